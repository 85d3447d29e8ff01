"""Tensor parallelism: each layer's matrices are cut over ranks that train on the same samples.

Alone, or inside data parallelism on a two-dimensional mesh with neighbouring ranks along `tp`. The layers are cut by
the model's own plan if transformers ships one, else by ours.

The cut is that of Megatron-LM (Shoeybi et al. 2019, section 3): the matrices that open an attention or an MLP by
columns, those that close it by rows, so that each pair needs one all-reduce forward and one backward. The table of
token embeddings is cut by its rows, as there, together with an output head that is tied to it; transformers' plans
leave both whole, which in fp32 under AdamW takes 16 bytes of every rank for each element.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

from ..catalog import OUR_TENSOR_PLANS, STRATEGIES
from ..invalid import InvalidInput
from ..model.optimizer import build_optimizer, dtype_name
from ..model.weights import Part, init_in_turn
from ..spec import Knobs
from .base import FullyShardedStrategy, MeshStrategy, mesh_of, shard_in_turn
from .sequence_parallel import SequencePlan, add_sequence_exchanges, plan_sequence, sequence_parts


class TensorParallel(MeshStrategy):
    """`tp`: one model over all ranks."""

    def __init__(self, knobs: Knobs, device: torch.device) -> None:
        super().__init__(knobs, device)
        self.gradient_factor = float(self.dp_degree)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Cut the model in place; a block is whole only between its initialization and its cut."""
        for _ in self.cut_in_turn(model):
            pass
        return model

    def cut_in_turn(self, model: nn.Module, modules: Iterable[nn.Module] | None = None) -> Iterator[Part]:
        """Yield the parts of `model`, each initialized and cut; of `modules` only, if given."""
        knobs, is_whole = self.knobs.others, not STRATEGIES[self.knobs.strategy].is_pipeline
        shared = {
            "sequence_parallel": is_whole and knobs["sequence_parallel"] == "on",
            "expert_parallel": is_whole and knobs["ep_degree"] > 1,
        }
        plan = plan_for(model, self.degrees["tp"], **shared)
        return cut_in_turn(model, plan, self.mesh["tp"], init_in_turn(model, self.knobs.seed, self.device, modules))

    def actual_fields(self, module: nn.Module) -> dict[str, Any]:
        """Read wrapper and mesh from the parameters, and what is around them from the module."""
        meshes = [mesh_of(parameter) for parameter in self.live_parameters(module)]
        is_sliced = all(mesh is not None and "tp" in mesh for mesh in meshes)
        outer, parts = super().actual_fields(module), sequence_parts(module)
        wrappers = {DTensor.__name__ if is_sliced else "none", outer["wrapper"]} - {"none"}
        return {
            "mesh": meshes[0],
            **outer,
            "wrapper": "+".join(sorted(wrappers)) or "none",
            "sequence_parallel": None if parts is None else "on" if parts == self.degrees["tp"] else "off",
            "ep_degree": expert_ranks(module),
        }


class DataTensorParallel(TensorParallel):
    """`ddp+tp`: the same slice on every data-parallel rank, its gradients averaged by DistributedDataParallel.

    DDP works on plain tensors only: the model has them, and the optimizer has DTensors over the same storage.
    """

    plain_and_dtensor: list[tuple[nn.Parameter, nn.Parameter]]
    """Each slice twice: the plain parameter that DDP reduces, and the DTensor over its storage."""

    def __init__(self, knobs: Knobs, device: torch.device) -> None:
        super().__init__(knobs, device)
        self.plain_and_dtensor = []

    def prepare(self, model: nn.Module) -> None:
        """Put the model in DDP over the `dp` axis, and build the optimizer over the DTensors."""
        self.module = self.wrap(model)
        self.optimizer = build_optimizer(nn.ParameterList(whole for _, whole in self.plain_and_dtensor), self.knobs)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Cut the model, and give DDP the plain slices."""
        super().wrap(model)
        return self.data_parallel(model)

    def data_parallel(self, model: nn.Module) -> DistributedDataParallel:
        """Give DDP over the `dp` axis the plain slices of a cut model, or of a stage of it."""
        plain: dict[nn.Parameter, nn.Parameter] = {}
        for module in model.modules():
            for name, parameter in list(module._parameters.items()):
                if isinstance(parameter, DTensor):
                    if parameter not in plain:
                        local = nn.Parameter(parameter.to_local().detach(), requires_grad=parameter.requires_grad)
                        local.whole_numel = parameter.numel()
                        plain[parameter] = local
                    module._parameters[name] = plain[parameter]
        self.plain_and_dtensor += [(local, whole) for whole, local in plain.items()]
        devices = [self.device] if self.device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=devices, process_group=self.mesh.get_group("dp"))

    def optimizer_step(self) -> None:
        """Give the reduced gradients to the DTensors, and free both after the step."""
        for local, whole in self.plain_and_dtensor:
            if local.grad is not None and isinstance(whole, DTensor):
                whole.grad = DTensor.from_local(local.grad, whole.device_mesh, whole.placements, run_check=False)
        super().optimizer_step()
        for local, _ in self.plain_and_dtensor:
            local.grad = None

    def live_parameters(self, module: nn.Module) -> Iterable[Tensor]:
        """The DTensors over the module's storage."""
        return [whole for _, whole in self.plain_and_dtensor]

    def actual_fields(self, module: nn.Module) -> dict[str, Any]:
        """Add the axis of DDP, and the dtype in which it reduces."""
        fields = super().actual_fields(module)
        mesh = {"dp": dist.get_world_size(self.mesh.get_group("dp")), **(fields["mesh"] or {})}
        return {**fields, "mesh": mesh, "reduce_dtype": dtype_name(next(module.parameters()).dtype)}


class ShardedTensorParallel(TensorParallel, FullyShardedStrategy):
    """`fsdp+tp`: each slice is cut again over the data-parallel ranks."""

    def wrap(self, model: nn.Module) -> nn.Module:
        """Cut by tensor parallelism, then shard the slices by FSDP over the `dp` axis."""
        shard_in_turn([model], self.cut_in_turn(model), self.mesh["dp"], self.knobs)
        return model


GATHERED_STYLES = ("colwise_gather_output", "colwise_rep")
"""Styles of transformers' plans that cut a matrix and make its output whole again."""
SUMMED_STYLES = ("replicated_with_grad_allreduce",)
"""Styles of transformers' plans that keep a parameter whole and sum its gradients over the ranks."""


@dataclass(frozen=True)
class Slice:
    """A parameter cut along `dim`. `parts` matrices lie packed there (query, key and value), each cut by itself."""

    dim: int
    parts: int = 1


EXPERT_SLICES = {"packed_colwise": Slice(1, parts=2), "rowwise": Slice(2), "grouped_gemm": Slice(0)}
"""The slices, by style, of a tensor of experts, which has the shape (experts, out, in)."""


@dataclass
class TensorPlan:
    """Parameters and modules to change, by their full names; all others are the same on every rank."""

    slices: dict[str, Slice] = field(default_factory=dict)
    summed: set[str] = field(default_factory=set)
    """Parameters that are whole on every rank but used on its own heads only: their gradients are summed over ranks."""
    once: set[str] = field(default_factory=set)
    """Biases added after a sum over ranks: only one rank adds them."""
    enters: set[str] = field(default_factory=set)
    """Modules that take whole activations; each rank computes with its own slice."""
    reduces: set[str] = field(default_factory=set)
    """Modules whose outputs are summed over ranks."""
    gathers: set[str] = field(default_factory=set)
    """Modules whose outputs are joined along the last dimension."""
    looks_up: set[str] = field(default_factory=set)
    """Embeddings cut by rows: each rank looks up its own ids, and the outputs are summed."""
    dispatches: set[str] = field(default_factory=set)
    """Experts cut by expert: tokens go to the rank that has theirs, and come back."""
    widths: list[tuple[str, str]] = field(default_factory=list)
    """Modules and their attributes that hold a width, which is smaller in a slice."""
    sequence: SequencePlan | None = None
    """The exchanges of sequence parallelism in the place of those of its modules above; None without it."""


def plan_for(
    model: nn.Module, degree: int, *, sequence_parallel: bool = False, expert_parallel: bool = False
) -> TensorPlan:
    """Plan the cut of `model` into `degree` slices. Raises InvalidInput if it has no plan or does not divide."""
    config: Any = model.config
    styles = _styles(model, expert_parallel=expert_parallel)
    plan, modules = TensorPlan(), dict(model.named_modules())
    for name, module in modules.items():
        for parameter in [None, *dict(module.named_parameters(recurse=False))]:
            full_name = name if parameter is None else f"{name}.{parameter}"
            style = next((style for pattern, style in styles.items() if pattern.fullmatch(full_name)), None)
            if style is None:
                continue
            if parameter is None:
                _cut_module(plan, model, name, module, style, degree)
            elif style not in EXPERT_SLICES:
                raise _unknown(full_name, style, config)
            else:
                plan.slices[full_name] = EXPERT_SLICES[style]
    for name, module in modules.items():
        parent, _, child_name = name.rpartition(".")
        # A norm over each head's queries or keys sees only this rank's heads.
        if child_name in ("q_norm", "k_norm") and f"{parent}.q_proj" in plan.enters:
            plan.summed |= {f"{name}.{parameter}" for parameter, _ in module.named_parameters(recurse=False)}
    _cut_vocabulary(plan, model, degree)
    parameters = dict(model.named_parameters())
    for name, cut in plan.slices.items():
        size = parameters[name].shape[cut.dim] if name in parameters else 0
        if size % (degree * cut.parts):
            raise InvalidInput(
                f"{config.model_type}: tp_degree={degree} does not divide the {size // cut.parts} columns of {name}",
                key="tp_degree",
            )
    if not plan.slices:
        raise InvalidInput(
            f"the tensor-parallel plan of {config.model_type} names no layer of this model", key="strategy"
        )
    if sequence_parallel:
        plan.sequence = plan_sequence(model, plan.enters, plan.reduces)
        plan.summed |= plan.sequence.summed
    return plan


def _styles(model: nn.Module, *, expert_parallel: bool) -> dict[re.Pattern[str], str]:
    """The style of each module or parameter that the plan of transformers or ours cuts, by a pattern of full names."""
    config: Any = model.config
    # The launch has refused families without a plan.
    plan = {**(getattr(config, "base_model_tp_plan", None) or OUR_TENSOR_PLANS[config.model_type])}
    if expert_parallel:
        plan.update(config.base_model_ep_plan)
    prefix = str(getattr(model, "base_model_prefix", ""))
    base = f"{prefix}." if hasattr(model, prefix) else ""
    styles = {f"{base}{pattern}": style for pattern, style in plan.items()}
    styles.update(getattr(type(model), "_tp_plan", None) or {})
    return {re.compile(re.escape(name).replace(r"\*", r"\d+")): style for name, style in styles.items()}


def _cut_module(plan: TensorPlan, model: nn.Module, name: str, module: nn.Module, style: str, degree: int) -> None:
    # transformers' Conv1D keeps its matrix as (in, out), nn.Linear as (out, in).
    out, into = (1, 0) if type(module).__name__ == "Conv1D" else (0, 1)
    has_bias = getattr(module, "bias", None) is not None
    if style in GATHERED_STYLES:
        weight: Any = module.weight
        tied = sum(weight is parameter for part in model.modules() for parameter in part._parameters.values()) > 1
        if tied or weight.shape[out] % degree:
            return
        plan.gathers.add(name)
    if style in ("colwise", *GATHERED_STYLES):
        plan.slices[f"{name}.weight"] = Slice(out)
        if has_bias:
            plan.slices[f"{name}.bias"] = Slice(0)
        plan.enters.add(name)
        if out == 1:
            plan.widths.append((name, "nf"))
    elif style == "packed_colwise" and out == 1:
        plan.slices[f"{name}.weight"] = Slice(out, parts=3)
        plan.slices[f"{name}.bias"] = Slice(0, parts=3)
        plan.enters.add(name)
        # GPT-2's attention splits the packed projection at a fixed width.
        plan.widths += [(name, "nf"), (name.rpartition(".")[0], "split_size")]
    elif style == "rowwise":
        plan.slices[f"{name}.weight"] = Slice(into)
        if has_bias:
            plan.once.add(f"{name}.bias")
        plan.reduces.add(name)
    elif style in SUMMED_STYLES:
        plan.summed |= {f"{name}.{parameter}" for parameter, _ in module.named_parameters(recurse=False)}
    elif style == "moe_tp_experts" and set(module._parameters) == {"gate_up_proj", "down_proj"}:
        plan.enters.add(name)
        plan.reduces.add(name)
    elif style == "ep_dispatch_experts" and hasattr(module, "num_experts"):
        plan.dispatches.add(name)
        plan.widths.append((name, "num_experts"))
    else:
        raise _unknown(name, style, model.config)


def _cut_vocabulary(plan: TensorPlan, model: nn.Module, degree: int) -> None:
    """Cut the rows of the token embeddings, unless they do not divide or are shared with other than an output head."""
    find: Any = getattr(model, "get_input_embeddings", None)
    table = getattr(find() if find else None, "weight", None)
    if table is None or table.shape[0] % degree:
        return
    sharing = {name: module for name, module in model.named_modules() if module._parameters.get("weight") is table}
    if not all(isinstance(module, nn.Embedding | nn.Linear) for module in sharing.values()):
        return
    for name, module in sharing.items():
        plan.slices[f"{name}.weight"] = Slice(0)
        if isinstance(module, nn.Embedding):
            plan.looks_up.add(name)
            continue
        plan.enters.add(name)
        plan.gathers.add(name)
        if module.bias is not None:
            # BERT's head and the module around it both hold its bias.
            named = model.named_parameters(remove_duplicate=False)
            plan.slices.update({name: Slice(0) for name, parameter in named if parameter is module.bias})


def _unknown(name: str, style: str, config: Any) -> InvalidInput:
    return InvalidInput(
        f"the tensor-parallel plan of {getattr(config, 'model_type', 'this model')} cuts {name} as {style!r},"
        " which this worker cannot do",
        key="strategy",
        allowed=["fsdp", "ddp"],
        nearest="fsdp",
    )


def cut_in_turn(model: nn.Module, plan: TensorPlan, mesh: DeviceMesh, parts: Iterable[Part]) -> Iterator[Part]:
    """Add the exchanges, and replace the parameters by DTensors over the one-dimensional `mesh`, in place.

    Takes whole parts and yields them cut, one after the other.
    """
    add_exchanges(model, plan, mesh)
    names = {id(module): name for name, module in model.named_modules()}
    for part in parts:
        _cut_part({names[id(module)]: module for module in part.modules}, plan, mesh)
        yield part


def _cut_part(modules: dict[str, nn.Module], plan: TensorPlan, mesh: DeviceMesh) -> None:
    at_rest: dict[nn.Parameter, nn.Parameter] = {}
    for name, module in modules.items():
        parameters = {key: parameter for key, parameter in module._parameters.items() if parameter is not None}
        for key, whole in parameters.items():
            # Tied parameters stay one.
            if whole not in at_rest:
                part_slice = plan.slices.get(f"{name}.{key}")
                local = sliced(whole.detach(), part_slice, mesh.get_local_rank(), mesh.size())
                placement = Replicate() if part_slice is None else Shard(part_slice.dim)
                tensor = DTensor.from_local(local, mesh, [placement], run_check=False)
                at_rest[whole] = nn.Parameter(tensor, requires_grad=whole.requires_grad)
            module._parameters[key] = at_rest[whole]
        if parameters:
            swap = _Swap(name, plan, mesh)
            module.register_forward_pre_hook(swap.in_forward, prepend=True)
            # Also if checkpointing stops a recomputation by an exception.
            module.register_forward_hook(swap.at_rest, always_call=True)


def add_exchanges(model: nn.Module, plan: TensorPlan, mesh: DeviceMesh) -> None:
    """Add hooks to the modules whose inputs or outputs change from whole to sliced or back, and set their widths."""
    for name, width in plan.widths:
        module = model.get_submodule(name)
        setattr(module, width, getattr(module, width) // mesh.size())
    group = mesh.get_group()
    if plan.sequence is not None:
        add_sequence_exchanges(model, plan.sequence, group)
    for name, module in model.named_modules():
        if name in plan.enters:
            module.register_forward_pre_hook(partial(_enter, group), with_kwargs=True)
        if name in plan.dispatches:
            dispatch_tokens(module, mesh)
        if isinstance(module, nn.Embedding) and name in plan.looks_up:
            _LookUp(module, mesh).add_hooks()
        elif name in plan.reduces:
            module.register_forward_hook(partial(_leave, group, _Sum))
        elif name in plan.gathers:
            module.register_forward_hook(partial(_leave, group, _Join))


def dispatch_tokens(experts: Any, mesh: DeviceMesh) -> None:
    """Let the experts' forward send each token to the ranks of its experts, by transformers' own exchange."""
    try:
        from transformers.distributed.expert_parallel import EpDispatchExpertsParallel

        EpDispatchExpertsParallel().install_forward(experts, mesh, tp_mesh=mesh, ep_implementation="all_to_all")
    except (ImportError, TypeError) as error:  # earlier versions have no such class, or no such argument
        message = "ep_degree needs the expert parallelism of transformers 5.23, and the installed one has another"
        raise InvalidInput(message, key="ep_degree", nearest="1") from error
    experts._is_expert_parallel = True  # as transformers marks experts that are spread


def expert_ranks(model: nn.Module) -> int:
    """Number of ranks over which the live model's experts are spread; 1 without expert parallelism."""
    for module in model.modules():
        if getattr(module, "_is_expert_parallel", False):
            experts: Any = next(module.parameters())
            local_numel = module.num_experts * experts.shape[1:].numel()
            return int(getattr(experts, "whole_numel", experts.numel()) // local_numel)
    return 1


def sliced(whole: Tensor, cut: Slice | None, rank: int, degree: int) -> Tensor:
    """Copy this rank's slice of a tensor; return the tensor itself without a cut."""
    if cut is None:
        return whole
    packed = whole.chunk(cut.parts, dim=cut.dim)
    return torch.cat([block.chunk(degree, dim=cut.dim)[rank] for block in packed], dim=cut.dim).clone()


class _Swap:
    """Swaps one module's DTensors for this rank's plain tensors during its forward."""

    def __init__(self, name: str, plan: TensorPlan, mesh: DeviceMesh) -> None:
        self.summed = {key.rpartition(".")[2] for key in plan.summed if key.rpartition(".")[0] == name}
        self.once = {key.rpartition(".")[2] for key in plan.once if key.rpartition(".")[0] == name}
        self.group = mesh.get_group()
        self.is_first_rank = mesh.get_local_rank() == 0
        self.saved_parameters: dict[str, nn.Parameter | None] = {}

    def in_forward(self, module: nn.Module, _inputs: Any) -> None:
        self.saved_parameters = dict(module._parameters)
        for key, parameter in self.saved_parameters.items():
            if parameter is not None:
                module._parameters[key] = self._local(key, parameter)  # type: ignore[assignment]

    def at_rest(self, module: nn.Module, _inputs: Any, _output: Any) -> None:
        module._parameters.update(self.saved_parameters)
        self.saved_parameters = {}

    def _local(self, key: str, parameter: Tensor) -> Tensor:
        local: Tensor = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if key in self.summed:
            copied: Tensor = _Copy.apply(local, self.group)  # type: ignore[no-untyped-call]
            return copied
        if key in self.once and not self.is_first_rank:
            # Zero, but with the whole gradient: the sum over ranks then has the bias once.
            return local - local.detach()
        return local


def _enter(group: Any, _module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Hook before a module: its input is whole on every rank, the input's gradient is summed over ranks."""

    def copied(value: Any) -> Any:
        differentiable = isinstance(value, Tensor) and value.is_floating_point()
        return _Copy.apply(value, group) if differentiable else value  # type: ignore[no-untyped-call]

    return tuple(copied(value) for value in inputs), {key: copied(value) for key, value in keywords.items()}


def _leave(
    group: Any, function: type[torch.autograd.Function], _module: nn.Module, _inputs: Any, output: Tensor
) -> Any:
    """Hook after a module: make its output whole again."""
    return function.apply(output, group)  # type: ignore[no-untyped-call]


class _LookUp:
    """Hooks around an embedding with this rank's rows: other ids give zeros, and the ranks' outputs are summed."""

    def __init__(self, table: nn.Embedding, mesh: DeviceMesh) -> None:
        self.table = table
        self.group = mesh.get_group()
        self.rows = table.num_embeddings // mesh.size()
        self.first_row = self.rows * mesh.get_local_rank()
        self.ours: Tensor | None = None

    def add_hooks(self) -> None:
        """Add the hooks, and keep the padding's row, which never learns, on one rank."""
        padding = self.table.padding_idx
        if padding is not None:
            is_here = self.first_row <= padding < self.first_row + self.rows
            self.table.padding_idx = padding - self.first_row if is_here else None
        self.table.num_embeddings = self.rows
        self.table.register_forward_pre_hook(self.before)
        self.table.register_forward_hook(self.after)

    def before(self, _module: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        local = inputs[0] - self.first_row
        self.ours = (local >= 0) & (local < self.rows)
        return (local.where(self.ours, 0),)

    def after(self, _module: nn.Module, _inputs: Any, output: Tensor) -> Any:
        assert self.ours is not None
        part = output.where(self.ours.unsqueeze(-1), 0.0)
        return _Sum.apply(part, self.group)  # type: ignore[no-untyped-call]


class _Copy(torch.autograd.Function):
    """Identity forward, sum over ranks backward (Megatron's f)."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _Sum(torch.autograd.Function):
    """Sum over ranks forward, identity backward (Megatron's g)."""

    @staticmethod
    def forward(_ctx: Any, value: Tensor, group: Any) -> Tensor:
        total = value.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Join(torch.autograd.Function):
    """Concatenate ranks along the last dimension forward, take this rank's part backward."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Any) -> Tensor:
        ctx.tp_rank, ctx.degree = dist.get_rank(group), dist.get_world_size(group)
        value = value.contiguous()
        parts = [torch.empty_like(value) for _ in range(ctx.degree)]
        dist.all_gather(parts, value, group=group)
        return torch.cat(parts, dim=-1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.chunk(ctx.degree, dim=-1)[ctx.tp_rank].contiguous(), None

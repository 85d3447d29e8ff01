"""Apply a tensor-parallel plan to a model: parameters become slices, and hooks exchange activations between ranks.

At rest every parameter is a DTensor (a replica if it is not cut), so that one optimizer takes them all. In its
module's forward it is this rank's plain tensor, so that any module computes as without a plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ..model.weights import Part
from .tensor_plan import Slice, TensorPlan


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
                at_rest[whole] = _at_rest(whole, plan.slices.get(f"{name}.{key}"), mesh)
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
    for name, module in model.named_modules():
        if name in plan.enters:
            module.register_forward_pre_hook(_Enter(group), with_kwargs=True)
        if isinstance(module, nn.Embedding) and name in plan.looks_up:
            _LookUp(module, mesh).add_hooks()
        elif name in plan.reduces:
            module.register_forward_hook(_Leave(group, _Sum))
        elif name in plan.gathers:
            module.register_forward_hook(_Leave(group, _Join))


def _at_rest(whole: nn.Parameter, cut: Slice | None, mesh: DeviceMesh) -> nn.Parameter:
    local = whole.detach()
    placement = Replicate() if cut is None else Shard(cut.dim)
    if cut is not None:
        rank, degree = mesh.get_local_rank(), mesh.size()
        packed = local.chunk(cut.parts, dim=cut.dim)
        local = torch.cat([block.chunk(degree, dim=cut.dim)[rank] for block in packed], dim=cut.dim).clone()
    return nn.Parameter(
        DTensor.from_local(local, mesh, [placement], run_check=False), requires_grad=whole.requires_grad
    )


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


class _Enter:
    """Hook before a module: its input is whole on every rank, the input's gradient is summed over ranks."""

    def __init__(self, group: Any) -> None:
        self.group = group

    def __call__(self, _module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        return tuple(self._copy(value) for value in inputs), {key: self._copy(value) for key, value in keywords.items()}

    def _copy(self, value: Any) -> Any:
        differentiable = isinstance(value, Tensor) and value.is_floating_point()
        return _Copy.apply(value, self.group) if differentiable else value  # type: ignore[no-untyped-call]


class _Leave:
    """Hook after a module: make its output whole again."""

    def __init__(self, group: Any, function: type[torch.autograd.Function]) -> None:
        self.group = group
        self.function = function

    def __call__(self, _module: nn.Module, _inputs: Any, output: Tensor) -> Any:
        return self.function.apply(output, self.group)  # type: ignore[no-untyped-call]


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

"""Layers in stages, one rank after the other, by torch.distributed.pipelining; also several pipelines side by side.

`ddp+pp` is a mesh of dp x pp ranks. Each row is a whole pipeline over its own slice of the global batch; gradients are
summed down the columns after the pipeline's backward. `naive-mp` is one process whose model has its layers spread over
several GPUs.
"""

from __future__ import annotations

import copy
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from ..catalog import SCHEDULES
from ..data.samples import Batch
from ..invalid import InvalidInput
from ..model.model_config import active_share, head_size
from ..model.optimizer import Objective, dtype_name
from ..model.weights import Part, init_in_turn, init_weights, transformer_blocks
from ..spec import Knobs
from .base import MeshStrategy, Strategy, visible_gpus


class PipelineParallel(MeshStrategy):
    """This rank's stages and the schedule that runs them."""

    _schedule: Any
    _tied: list[nn.Parameter]
    """Parameters that both the first and the last stage have."""
    _ends: Any
    """The process group of the first and the last rank of this row, if they share parameters."""
    _objective: Objective
    """The objective of the running step, which the schedule's loss function reads."""
    _targets: Tensor
    """The count of targets in the running step's global batch, which the schedule's loss function reads."""

    @property
    def dropout_rank(self) -> int:
        """Another number for each stage of each pipeline, which are different layers and samples."""
        return self.dp_rank * self.degrees["pp"] + self.axis_ranks["pp"]

    def wrap(self, model: nn.Module) -> nn.Module:
        """Initialize this rank's stages of `model`, which alone get memory, and make the schedule."""
        knobs, schedule, degree = self.knobs, SCHEDULES[self.knobs.pp_schedule], self.degrees["pp"]
        stage_count = degree * schedule.stages_per_rank
        division = cut(model, stage_count, knobs.seq_len)
        owned = range(self.axis_ranks["pp"], stage_count, degree)
        stages = [division.stage(index) for index in owned]
        for stage in stages:
            stage.autocast = self.precision.autocast
        tied_places = division.tied_places()
        modules = nn.ModuleList(self.wrap_stages(model, stages))
        self._tied = _join_places(tied_places, set(modules.modules()))
        if tied_places:
            # Every rank takes part in making every group: the first and the last of each row along pp.
            rows = self.mesh.mesh.movedim(1, -1).reshape(-1, degree).tolist()
            groups = {rank: group for row in rows for group in [dist.new_group([row[0], row[-1]])] for rank in row}
            self._ends = groups[dist.get_rank()]
        parts = [
            pipelining.PipelineStage(module, index, stage_count, self.device, group=self.mesh.get_group("pp"))
            for module, index in zip(modules, owned, strict=True)
        ]
        schedule_class = getattr(pipelining, schedule.wrapper)
        scheduled = parts if schedule.stages_per_rank > 1 else parts[0]
        self._schedule = schedule_class(scheduled, knobs.micro_batches, loss_fn=self._loss, scale_grads=False)
        if self.precision.scaler is not None:
            # GradScaler makes its scale with the first loss, and only the last stage has one.
            self.precision.scaler.scale(torch.zeros((), device=self.device))
        return modules

    def wrap_stages(self, model: nn.Module, stages: list[StageModule]) -> list[nn.Module]:
        """Initialize these stages of `model`, and return them as the schedule runs them."""
        init_weights(model, self.knobs.seed, self.device, chain(*(stage.modules() for stage in stages)))
        return list(stages)

    def forward_backward(
        self, micro_batches: list[Batch], targets: Tensor, objective: Objective, enter: Callable[[str], None]
    ) -> Tensor:
        """Run the schedule, whose forwards and backwards interleave: one phase that cannot be split."""
        # Every rank of a row has the same batch, so `targets`, a column's sum, counts the whole global batch.
        self._objective, self._targets = objective, targets
        enter("forward_backward")
        total = torch.zeros((), device=self.device)
        for batch in micro_batches:
            losses: list[Tensor] = []
            # The schedule takes the inputs on the first stage and the labels on the last.
            inputs = [batch["input_ids"]] if self._is_first else []
            labels = objective.targets(batch) if self._is_last else None
            self._schedule.step(*inputs, target=labels, losses=losses, return_outputs=False)
            if losses:
                total += torch.stack([loss.detach() for loss in losses]).sum()
        scale = self.precision.scale()
        if scale is not None:
            total /= scale
        # A tied weight's gradients over the two ends of a row, then every gradient down the column.
        for parameter in self._tied:
            dist.all_reduce(_local(parameter.grad), group=self._ends)
        self.reduce_gradients()
        # All ranks of a tp group have the loss.
        return total / (self.gradient_factor * self.degrees.get("tp", 1))

    def reduce_gradients(self) -> None:
        """Sum the gradients over the pipelines side by side."""
        if self.dp_degree > 1:
            column = self.mesh.get_group("dp")
            gradients = [parameter.grad for parameter in self.module.parameters() if parameter.grad is not None]
            for work in [dist.all_reduce(gradient, group=column, async_op=True) for gradient in gradients]:
                work.wait()

    def optimizer_step(self) -> None:
        """Step as in one process; all stages agree on the norm and on an fp16 overflow."""
        scaler = self.precision.scaler
        if scaler is not None:
            self.precision.unscale(self.optimizer)
            # GradScaler has no public way to say that another rank overflowed.
            for overflowed in scaler._per_optimizer_states[id(self.optimizer)]["found_inf_per_device"].values():
                dist.all_reduce(overflowed, dist.ReduceOp.MAX)
        if self.knobs.grad_clip > 0:
            self.clip_gradients(self.knobs.grad_clip)
        self.precision.step(self.optimizer)
        self.optimizer.zero_grad(set_to_none=True)

    def all_reduce_async(self, value: Tensor) -> Any:
        """Sum over all ranks in the background: only last stages have a loss, the others add zero."""
        return dist.all_reduce(value, async_op=True)

    def clip_gradients(self, max_norm: float) -> None:
        """Clip by the norm over all stages and slices, in which a tied weight counts once, as `clip_grad_norm_`."""
        gradients = [parameter.grad for parameter in self.live_parameters(self.module) if parameter.grad is not None]
        # By their memory, which the plain slices that DDP has share with the optimizer's DTensors.
        copies = {_local(parameter.grad).data_ptr() for parameter in self._tied} if self._is_last else set()
        squares = torch.zeros((), device=self.device)
        for gradient in gradients:
            if _local(gradient).data_ptr() not in copies:
                squares += _local(gradient).float().square().sum() / self._holders(gradient)
        dist.all_reduce(squares)
        factor = (max_norm / (squares.sqrt() + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            _local(gradient).mul_(factor.to(gradient.dtype))

    def _holders(self, gradient: Tensor) -> int:
        """Number of the stage's ranks that have the same elements of a gradient."""
        axes = (
            zip(gradient.device_mesh.shape, gradient.placements, strict=True) if isinstance(gradient, DTensor) else ()
        )
        parts = math.prod(size for size, placement in axes if not placement.is_replicate())
        return self.dp_degree * self.degrees.get("tp", 1) // parts

    def actual_fields(self, module: nn.Module) -> dict[str, Any]:
        """Read the schedule's class, stages and mesh, and what is around the stages."""
        dtype = dtype_name(next(module.parameters()).dtype)
        stage = super().actual_fields(next(module.children()))
        return {
            "reduce_dtype": dtype if self.dp_degree > 1 else None,
            **stage,
            "wrapper": "+".join(sorted({stage["wrapper"], type(self._schedule).__name__} - {"none"})),
            "mesh": dict(zip(self.mesh.mesh_dim_names or (), self.mesh.shape, strict=True)),
            "pipeline_stages": self._schedule._num_stages,
        }

    @property
    def _is_first(self) -> bool:
        return self.axis_ranks["pp"] == 0

    @property
    def _is_last(self) -> bool:
        return self.axis_ranks["pp"] == self.degrees["pp"] - 1

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        loss = self._objective.loss_of_logits(logits, labels) * (self.gradient_factor / self._targets)
        scaler = self.precision.scaler
        return loss if scaler is None else scaler.scale(loss)


def _local(tensor: Any) -> Tensor:
    """This rank's part of a tensor; the tensor itself if it is plain."""
    part: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return part


def _join_places(tied_places: Iterable[list[tuple[nn.Module, str]]], owned: set[nn.Module]) -> list[nn.Parameter]:
    """Return the tied parameters of the `owned` modules, and make them the whole model's again, which counts them."""
    tied: list[nn.Parameter] = []
    for places in tied_places:
        for parameter in [module._parameters[key] for module, key in places if module in owned][:1]:
            assert parameter is not None
            tied.append(parameter)
            for module, key in places:
                module._parameters[key] = parameter
    return tied


class _PassOn(nn.Module):
    """Replaces an embedding: its output came from the stage before."""

    def forward(self, inputs_embeds: Tensor, **_unused: Any) -> Tensor:
        return inputs_embeds


class _NothingToAdd(nn.Module):
    """Replaces a position table that the first stage has already added."""

    def forward(self, position_ids: Tensor) -> Tensor:
        return torch.zeros((), device=position_ids.device)


Replacement = Callable[[], nn.Module] | None
"""Makes the module that replaces one of another stage; None if nothing replaces it."""


@dataclass(frozen=True)
class Layout:
    """The parts of a model family that a pipeline divides, by their full names."""

    layers: str
    entry: dict[str, Replacement]
    """Modules for the first stage only."""
    exit: dict[str, Replacement]
    """Modules for the last stage only."""


_LLAMA = Layout("model.layers", {"model.embed_tokens": None}, {"model.norm": nn.Identity, "lm_head": None})
LAYOUTS: dict[str, Layout] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen3": _LLAMA,
    "mixtral": _LLAMA,
    "gpt2": Layout(
        "transformer.h",
        {"transformer.wte": None, "transformer.wpe": _NothingToAdd, "transformer.drop": nn.Identity},
        {"transformer.ln_f": nn.Identity, "lm_head": None},
    ),
    "bert": Layout(
        "bert.encoder.layer",
        {"bert.embeddings": _PassOn},
        {"bert.pooler": None, "cls": None, "dropout": None, "classifier": None},
    ),
}
"""The layouts that can be cut into stages, by `model_type`; `PIPELINE_OBJECTIVES` of the catalog has their heads."""


class StageModule(nn.Module):
    """One stage: takes token ids or hidden states, returns hidden states, or logits on the last."""

    def __init__(self, model: nn.Module, *, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.model = model
        self.is_first = is_first
        self.is_last = is_last
        self.autocast: Callable[[], AbstractContextManager[Any]] = nullcontext

    def forward(self, inputs: Tensor) -> Tensor:
        """`(batch, seq)` or `(batch, seq, hidden)` to `(batch, seq, hidden)` or logits."""
        name = "input_ids" if self.is_first else "inputs_embeds"
        model: Any = self.model
        with self.autocast():
            output = (model if self.is_last else model.base_model)(**{name: inputs})
        result: Tensor = output.logits if self.is_last else output.last_hidden_state
        return result


@dataclass(frozen=True)
class Cut:
    """A model with its layers divided: stage s has layers `bounds[s]` up to `bounds[s + 1]`."""

    model: nn.Module
    layout: Layout
    bounds: tuple[int, ...]

    @property
    def stage_count(self) -> int:
        """Number of stages."""
        return len(self.bounds) - 1

    def tied(self) -> list[nn.Parameter]:
        """Parameters that both the first and the last stage have: tied embeddings."""
        first_ids = {id(parameter) for parameter in _parameters(self._parts(self.layout.entry))}
        return [parameter for parameter in _parameters(self._parts(self.layout.exit)) if id(parameter) in first_ids]

    def tied_places(self) -> list[list[tuple[nn.Module, str]]]:
        """For each of `tied` the modules that have it, and its name there."""
        modules = [module for part in self._end_parts() for module in part.modules()]
        return [
            [(module, key) for module in modules for key, value in module._parameters.items() if value is parameter]
            for parameter in self.tied()
        ]

    def _end_parts(self) -> list[nn.Module]:
        return [*self._parts(self.layout.entry), *self._parts(self.layout.exit)]

    def stage(self, index: int) -> StageModule:
        """Make stage `index`, which shares its parameters with the whole model."""
        is_first, is_last = index == 0, index == self.stage_count - 1
        begin, end = self.bounds[index], self.bounds[index + 1]
        layers = _module_at(self.model, self.layout.layers)
        assert isinstance(layers, nn.ModuleList)
        shared_modules = [*layers, *self._end_parts()]
        # Modules in the memo are not copied: only the frame around the layers is new.
        frame = copy.deepcopy(self.model, {id(module): module for module in shared_modules})
        _put_module(frame, self.layout.layers, nn.ModuleList(list(layers)[begin:end]))
        for is_left_out, replacements in ((not is_first, self.layout.entry), (not is_last, self.layout.exit)):
            for path, replacement in replacements.items() if is_left_out else ():
                if _module_at(frame, path) is not None:
                    _put_module(frame, path, replacement() if replacement else None)
        config: Any = frame.config
        if getattr(config, "layer_types", None):
            # Indexed by the position in the layer list; set without the configuration's check of its length.
            config.__dict__["layer_types"] = config.layer_types[begin:end]
        return StageModule(frame, is_first=is_first, is_last=is_last)

    def _parts(self, replacements: dict[str, Replacement]) -> list[nn.Module]:
        parts = [_module_at(self.model, path) for path in replacements]
        return [module for module in parts if module is not None]


def cut(model: nn.Module, stage_count: int, seq_len: int) -> Cut:
    """Divide `model` into `stage_count` stages of about equal FLOPs.

    The launch has refused families and heads without a layout, and more stages than layers.
    """
    config: Any = model.config
    layout = LAYOUTS[config.model_type]
    layers = _module_at(model, layout.layers)
    assert isinstance(layers, nn.ModuleList)
    whole = Cut(model, layout, (0, len(layers)))
    head_cost = sum(_multiplied(part, config) for part in whole._parts(layout.exit))
    if type(model).__name__.endswith("ForSequenceClassification"):
        # This head reads one token of a sample.
        head_cost /= seq_len
    # Attention's own products in the same unit: H * (d_qk + d_v) * s per token and layer (torchtitan).
    scores = float(config.num_attention_heads * 2 * head_size(config) * seq_len)
    costs = [_multiplied(layer, config) + scores for layer in layers]
    return Cut(model, layout, balance(costs, head_cost, stage_count))


def _multiplied(module: nn.Module, config: Any) -> float:
    """Parameters that multiply a token, a sixth of its training FLOPs; only the active share of experts."""
    active = active_share(config)
    return sum(p.numel() * (active if ".experts." in name else 1.0) for name, p in module.named_parameters())


def _parameters(modules: list[nn.Module]) -> list[nn.Parameter]:
    return [parameter for module in modules for parameter in module.parameters()]


def _module_at(model: nn.Module, path: str) -> nn.Module | None:
    part: Any = model
    for name in path.split("."):
        part = getattr(part, name, None)
    return part if isinstance(part, nn.Module) else None


def _put_module(model: nn.Module, path: str, module: nn.Module | None) -> None:
    parent, _, name = path.rpartition(".")
    model.get_submodule(parent)._modules[name] = module


def balance(costs: list[float], head: float, stages: int, entry: float = 0.0) -> tuple[int, ...]:
    """Return the bounds of `stages` non-empty runs of layers that make the most expensive stage as cheap as possible.

    `entry` adds to the first stage, `head` to the last. Among equal divisions the smallest sum of squares wins.
    """
    cost_before = list(accumulate(costs, initial=0.0))
    count = len(costs)
    # best[end] for the first s stages covering `end` layers: (highest, squares, bounds).
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, (0,))}
    for stage in range(1, stages + 1):
        extra = (entry if stage == 1 else 0.0) + (head if stage == stages else 0.0)
        next_best: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for end in range(stage, count - (stages - stage) + 1):
            options = []
            for begin, (highest, squares, bounds) in best.items():
                if begin < end:
                    cost = cost_before[end] - cost_before[begin] + extra
                    options.append((max(highest, cost), squares + cost * cost, (*bounds, end)))
            next_best[end] = min(options)
        best = next_best
    return best[count][2]


class SpreadLayers(Strategy):
    """Layers with about as many parameters on each GPU; activations move, and one GPU works at a time."""

    def __init__(self, knobs: Knobs, device: torch.device) -> None:
        super().__init__(knobs, device)
        self.devices = visible_gpus()

    def wrap(self, model: nn.Module) -> nn.Module:
        """Initialize each part on the first GPU, and move it to its own GPU before the next part."""
        spread_parts(model, init_in_turn(model, self.knobs.seed, self.devices[0]), self.devices)
        return model

    def actual_fields(self, module: nn.Module) -> dict[str, Any]:
        """Count the devices that hold parameters."""
        devices = {parameter.device for parameter in module.parameters()}
        return {**super().actual_fields(module), "mesh": {"mp": len(devices)}}


def spread_parts(model: nn.Module, parts: Iterable[Part], devices: list[torch.device]) -> None:
    """Move the parts of `model` to `devices` as they come, about as many parameters to each.

    A hook moves every module's inputs to its device. Raises InvalidInput if there are more devices than blocks.
    """
    layers = divide(model, len(devices))
    device_of = {
        id(block): devices[bisect_right(layers.bounds, index) - 1] for index, block in enumerate(layers.blocks)
    }
    placed: dict[int, nn.Parameter] = {}
    for part in parts:
        if part.block is not None:
            part.block.to(device_of[id(part.block)])
            continue
        for module in layers.before:
            _move_own(module, devices[0], placed)
        for module in layers.after:
            _move_own(module, devices[-1], placed)
    for module in (*layers.before, *layers.blocks, *layers.after):
        module.register_forward_pre_hook(move_inputs, with_kwargs=True, prepend=True)


@dataclass(frozen=True)
class Layers:
    """A model's blocks, of which device d has `bounds[d]` up to `bounds[d + 1]`.

    The modules `before` the blocks are on the first device, those `after` on the last.
    """

    before: list[nn.Module]
    blocks: list[nn.Module]
    after: list[nn.Module]
    bounds: tuple[int, ...]


def divide(model: nn.Module, count: int) -> Layers:
    """Divide the blocks of `model` in their order, about as many parameters to each of `count` devices.

    Raises InvalidInput if there are more devices than blocks.
    """
    blocks = transformer_blocks(model)
    if count > len(blocks):
        raise InvalidInput(
            f"{count} devices are more than the model's {len(blocks)} layers",
            key="devices",
            allowed=[f"2 to {len(blocks)}"],
        )
    before, after = _around(model, blocks)
    sizes = [float(_elements([block])) for block in blocks]
    bounds = balance(sizes, float(_elements(after)), count, entry=float(_elements(before)))
    return Layers(before, blocks, after, bounds)


def _around(model: nn.Module, blocks: list[nn.Module]) -> tuple[list[nn.Module], list[nn.Module]]:
    """Modules with tensors of their own before and after the blocks."""
    inside = {id(nested) for block in blocks for nested in block.modules()}
    before: list[nn.Module] = []
    after: list[nn.Module] = []
    passed = False
    for module in model.modules():
        if id(module) in inside:
            passed = True
        elif any(True for _ in module.parameters(recurse=False)):
            (after if passed else before).append(module)
        elif any(True for _ in module.buffers(recurse=False)):
            # Rotary tables take the inputs of the first block.
            before.append(module)
    return before, after


def _elements(modules: list[nn.Module]) -> int:
    return sum({id(p): p.numel() for module in modules for p in module.parameters()}.values())


def move_inputs(module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, Any]:
    """Move the inputs of `module` to the device of its parameters or buffers."""
    device = next(tensor.device for tensor in chain(module.parameters(), module.buffers()))
    moved: tuple[Any, Any] = tree_map_only(
        Tensor, lambda tensor: tensor.to(device, non_blocking=True), (inputs, keywords)
    )
    return moved


def _move_own(module: nn.Module, device: torch.device, placed: dict[int, nn.Parameter]) -> None:
    """Move the module's own tensors, not its children's. A tied parameter stays where it was `placed` first."""
    for name, parameter in module._parameters.items():
        if parameter is not None:
            if id(parameter) not in placed:
                moved = nn.Parameter(parameter.detach().to(device), requires_grad=parameter.requires_grad)
                placed[id(parameter)] = placed[id(moved)] = moved
            module._parameters[name] = placed[id(parameter)]
    for name, buffer in list(module.named_buffers(recurse=False)):
        module._buffers[name] = buffer.to(device)

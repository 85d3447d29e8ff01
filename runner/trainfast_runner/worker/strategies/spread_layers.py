"""`naive-mp`: one process whose model has its layers spread over several GPUs."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ..invalid import InvalidInput
from ..model.weights import Part, init_in_turn, transformer_blocks
from ..spec import Knobs
from .base import Strategy, visible_gpus
from .pipeline import balance


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

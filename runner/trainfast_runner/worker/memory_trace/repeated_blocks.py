"""Stacks of blocks that are all alike, of which a few can stand for the rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

KEPT = 3
"""Blocks that are left of a stack: the first, the one that is repeated, the last."""
NUMBERS = ("layer_idx", "layer_id", "layer_number", "layer_index", "block_idx")
"""Attributes in which blocks of one kind differ: their place."""


@dataclass(frozen=True)
class Stack:
    """An outermost list of blocks by its `name`: those that are left, and how many parameters each had of all."""

    name: str
    blocks: tuple[nn.Module, ...]
    sizes: tuple[int, ...]

    @property
    def repeats(self) -> int:
        """How many blocks the second of those left stands for."""
        return len(self.sizes) - len(self.blocks) + 1

    def stood_for(self, name: str) -> list[str]:
        """The names in the whole model of what a parameter of the shortened one, by its `name`, stands for."""
        inside = name.removeprefix(f"{self.name}.")
        if inside == name:
            return [name]
        index, _, rest = inside.partition(".")
        count, kept = len(self.sizes), len(self.blocks)
        first = int(index) if int(index) < 2 else int(index) + count - kept
        last = first + (count - kept if int(index) == 1 else 0)
        return [f"{self.name}.{place}.{rest}" for place in range(first, last + 1)]


def shorten(model: nn.Module, config: Any, whole: bool, keep: int = KEPT) -> list[Stack]:
    """Cut every stack of more than `keep` blocks that are all alike down to that, in place; none where `whole`.

    The first block may differ from the others: a T5's alone has the table of relative positions.
    """
    stacks: list[Stack] = []
    inside: set[int] = set()
    for name, module in list(model.named_modules()):
        if not isinstance(module, nn.ModuleList) or id(module) in inside:
            continue
        inside |= {id(nested) for nested in module.modules()}
        blocks = list(module)
        sizes = tuple(sum(p.numel() for p in block.parameters()) for block in blocks)
        if not whole and len(blocks) > keep and _all_alike(blocks, config):
            kept = [*blocks[: keep - 1], blocks[-1]]
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, nn.ModuleList(kept))
            blocks = kept
        stacks.append(Stack(name, tuple(blocks), sizes))
    return stacks


def _all_alike(blocks: list[nn.Module], config: Any) -> bool:
    for value in config.to_dict().values():
        # One entry a layer, such as `layer_types`, which the model's own forward may ask instead of the block.
        if isinstance(value, list) and len(value) == len(blocks) and len({repr(one) for one in value[1:]}) > 1:
            return False
    return len({_traits(block) for block in blocks[1:]}) == 1


def _traits(block: nn.Module) -> Any:
    modules = tuple((name, type(module), _plain_attributes(module)) for name, module in block.named_modules())
    parameters = tuple((name, p.shape, p.dtype, p.requires_grad) for name, p in block.named_parameters())
    return modules, parameters


def _plain_attributes(module: nn.Module) -> Any:
    return tuple(
        (name, value)
        for name, value in sorted(vars(module).items())
        if isinstance(value, bool | int | float | str) and name not in NUMBERS
    )

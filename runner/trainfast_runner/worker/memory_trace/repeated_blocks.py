"""Stacks of identical blocks, where a few blocks stand for the rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

KEPT_BLOCKS = 3
"""Blocks kept of a stack: the first, one for all between, and the last."""
PLACE_ATTRIBUTES = ("layer_idx", "layer_id", "layer_number", "layer_index", "block_idx")
"""Attributes in which blocks of one kind differ: their place."""


@dataclass(frozen=True)
class TracedStack:
    """An outermost list of blocks: the kept ones, and the number of parameters of each block of the whole model."""

    name: str
    blocks: tuple[nn.Module, ...]
    sizes: tuple[int, ...]

    @property
    def repeats(self) -> int:
        """Number of blocks that the second kept block stands for."""
        return len(self.sizes) - len(self.blocks) + 1

    def whole_model_names(self, name: str) -> list[str]:
        """Names in the whole model of the parameters that parameter `name` of the shortened model stands for."""
        inner_name = name.removeprefix(f"{self.name}.")
        if inner_name == name:
            return [name]
        index, _, rest = inner_name.partition(".")
        count, kept_count = len(self.sizes), len(self.blocks)
        first_index = int(index) if int(index) < 2 else int(index) + count - kept_count
        last_index = first_index + (count - kept_count if int(index) == 1 else 0)
        return [f"{self.name}.{position}.{rest}" for position in range(first_index, last_index + 1)]


def shorten(model: nn.Module, config: Any, keep: int = KEPT_BLOCKS, *, whole: bool) -> list[TracedStack]:
    """Cut every stack of more than `keep` identical blocks to `keep` blocks, in place; none if `whole`.

    The first block may differ from the others: a T5's alone has the table of relative positions.
    """
    stacks: list[TracedStack] = []
    inside: set[int] = set()
    for name, module in list(model.named_modules()):
        if not isinstance(module, nn.ModuleList) or id(module) in inside:
            continue
        inside |= {id(nested) for nested in module.modules()}
        blocks = list(module)
        sizes = tuple(sum(p.numel() for p in block.parameters()) for block in blocks)
        if not whole and len(blocks) > keep and _all_identical(blocks, config):
            kept_blocks = [*blocks[: keep - 1], blocks[-1]]
            parent, _, child_name = name.rpartition(".")
            setattr(model.get_submodule(parent), child_name, nn.ModuleList(kept_blocks))
            blocks = kept_blocks
        stacks.append(TracedStack(name, tuple(blocks), sizes))
    return stacks


def _all_identical(blocks: list[nn.Module], config: Any) -> bool:
    for value in config.to_dict().values():
        # One entry a layer, such as `layer_types`, which the model's own forward may ask instead of the block.
        if isinstance(value, list) and len(value) == len(blocks) and len({repr(item) for item in value[1:]}) > 1:
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
        if isinstance(value, bool | int | float | str) and name not in PLACE_ATTRIBUTES
    )

"""A model's transformer blocks, which strategies initialize, shard and place one by one."""

from __future__ import annotations

from torch import nn

from .invalid import InvalidInput


def outermost_lists(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of the outermost lists of layers in the order they run; an encoder's before a decoder's."""
    lists: list[nn.Module] = []
    inside: set[int] = set()
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and id(module) not in inside:
            inside |= {id(nested) for nested in module.modules()}
            # One object may be listed under two names.
            lists += [block for block in module if all(block is not other for other in lists)]
    return lists


def transformer_blocks(model: nn.Module) -> list[nn.Module]:
    """As `outermost_lists`. Raises InvalidInput for a model without such a list."""
    lists = outermost_lists(model)
    if not lists:
        raise InvalidInput(
            f"{type(model).__name__} has no list of layers to spread",
            key="strategy",
            allowed=["single", "ddp"],
            nearest="ddp",
        )
    return lists

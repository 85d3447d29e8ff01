"""A model's transformer blocks, which strategies initialize, shard and place one by one."""

from __future__ import annotations

from torch import nn

from ..invalid import InvalidInput


def outermost_lists(model: nn.Module) -> list[nn.Module]:
    """Members of the outermost lists of layers in the order they run; an encoder's before a decoder's."""
    found: list[nn.Module] = []
    inside: set[int] = set()
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and id(module) not in inside:
            inside |= {id(nested) for nested in module.modules()}
            # One object may be listed under two names.
            found += [block for block in module if all(block is not other for other in found)]
    return found


def transformer_blocks(model: nn.Module) -> list[nn.Module]:
    """As `outermost_lists`. Raises InvalidInput for a model without such a list."""
    found = outermost_lists(model)
    if not found:
        raise InvalidInput(
            f"{type(model).__name__} has no list of layers to spread",
            key="strategy",
            allowed=["single", "ddp"],
            nearest="ddp",
        )
    return found

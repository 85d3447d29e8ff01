"""A model's transformer blocks, which strategies initialize, shard and place one by one."""

from __future__ import annotations

from torch import nn

from ..invalid import InvalidInput


def outermost_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of all outermost layer lists in the order they run; an encoder's before a decoder's."""
    blocks: list[nn.Module] = []
    inside: set[int] = set()
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and id(module) not in inside:
            inside |= {id(nested) for nested in module.modules()}
            # One object may be listed under two names.
            blocks += [block for block in module if all(block is not other for other in blocks)]
    return blocks


def transformer_blocks(model: nn.Module) -> list[nn.Module]:
    """Return `outermost_blocks`. Raises InvalidInput if the model has none."""
    blocks = outermost_blocks(model)
    if not blocks:
        raise InvalidInput(
            f"{type(model).__name__} has no list of layers to spread",
            key="strategy",
            allowed=["single", "ddp"],
            nearest="ddp",
        )
    return blocks

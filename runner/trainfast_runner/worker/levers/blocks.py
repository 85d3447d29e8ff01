"""The blocks of a model: the layers that repeat, whose lists nothing else repeats, and those compiled in place."""

from typing import Any

from torch import nn


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


def compiled_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the modules that torch.compile has compiled in place."""
    return [module for module in model.modules() if getattr(module, "_compiled_call_impl", None) is not None]


def actual(model: nn.Module) -> dict[str, Any]:
    """Return `compiled_blocks`, counted on the live modules."""
    return {"compiled_blocks": len(compiled_blocks(model))}

"""The blocks that torch.compile has compiled in place."""

from __future__ import annotations

from typing import Any

from torch import nn


def compiled_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the modules that torch.compile has compiled in place."""
    return [module for module in model.modules() if getattr(module, "_compiled_call_impl", None) is not None]


def actual(model: nn.Module) -> dict[str, Any]:
    """Return `compiled_blocks`, counted on the live modules."""
    return {"compiled_blocks": len(compiled_blocks(model))}

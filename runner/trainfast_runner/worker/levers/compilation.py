"""The blocks that torch.compile has compiled in place, and its mode for the whole model."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..spec import Knobs


def mode_of(knobs: Knobs) -> str | None:
    """torch.compile's `mode`, without CUDA graphs if gradients accumulate over micro-batches.

    A replay of a CUDA graph overwrites the gradients of the last one (torch/_inductor, cudagraph_trees.py).
    """
    if knobs.compile in ("default", "blocks"):
        return None
    if knobs.grad_accum == 1:
        return knobs.compile
    return "max-autotune-no-cudagraphs" if knobs.compile == "max-autotune" else None


def compiled_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the modules that torch.compile has compiled in place."""
    return [module for module in model.modules() if getattr(module, "_compiled_call_impl", None) is not None]


def actual(model: nn.Module) -> dict[str, Any]:
    """Return `compiled_blocks`, counted on the live modules."""
    return {"compiled_blocks": len(compiled_blocks(model))}

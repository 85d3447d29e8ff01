"""The words for memory by category and for the phases of a step at whose peak it is measured."""

from __future__ import annotations

CATEGORIES = {
    "params": "parameters",
    "grads": "gradients",
    "optimizer": "optimizer states",
    "activations": "activations",
    "temporary": "temporary tensors",
    "communication": "communication buffers",
}
"""The categories of a prediction, by their JSON names."""
PHASES = {"forward_backward": "forward and backward", "optimizer": "the optimizer step"}


def short(category: str) -> str:
    """Return the category's first word, for a table or a legend."""
    return CATEGORIES.get(category, category).partition(" ")[0]

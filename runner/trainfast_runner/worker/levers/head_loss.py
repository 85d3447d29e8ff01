"""The loss inside the model's forward, a chunk of tokens at a time, so that the logits are never whole.

The model's own forward runs with a head that returns its input: final norms, a transform before the head and a scale
stay the model's own, under any wrapper.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ..spec import Knobs

CHUNKS = 8
"""Pieces that the tokens of a micro-batch are cut into. A constant number, so that memory stays a line in the batch.

Chosen: with eight the logits and their gradients, about three times the logits, fall below one of them, and each chunk
of 2,048 tokens still fills a matrix product."""


class HeadLoss:
    """The forward of a model whose loss is computed in chunks: called with the targets, it returns their loss."""

    def __init__(self, model: Any) -> None:
        """Take the place of the forwards of `model` and of its head."""
        self.head: nn.Linear = model.get_output_embeddings()
        self.states: Callable[..., Any] = model.forward
        # The cap belongs to the logits, which the model's own forward no longer sees.
        self.cap: float | None = getattr(model.config, "final_logit_softcapping", None)
        if self.cap is not None:
            model.config.final_logit_softcapping = None
        self.head.forward = _unchanged
        model.forward = self

    def __call__(self, *args: Any, targets: Tensor, **inputs: Any) -> Tensor:
        """Return the sum of the targets' cross entropies; `targets` has the shape of the tokens."""
        states = self.states(*args, **inputs).logits.flatten(0, -2)
        flat_targets = targets.flatten()
        rows = -(-len(states) // CHUNKS)
        total = torch.zeros((), device=states.device)
        for start in range(0, len(states), rows):
            chunk = states[start : start + rows], flat_targets[start : start + rows]
            total = total + checkpoint(self._loss, *chunk, use_reentrant=False, preserve_rng_state=False)
        return total

    def _loss(self, states: Tensor, targets: Tensor) -> Tensor:
        logits = functional.linear(states, self.head.weight, self.head.bias)
        if self.cap is not None:
            logits = self.cap * torch.tanh(logits / self.cap)
        # torch's own `ignore_index` is the data's label of a token that does not count.
        return functional.cross_entropy(logits.float(), targets, reduction="sum")


def _unchanged(states: Tensor) -> Tensor:
    return states


def chunk_loss(model: nn.Module, knobs: Knobs) -> None:
    """Compute the model's loss in chunks."""
    HeadLoss(model)


def actual(model: nn.Module) -> dict[str, Any]:
    """Return `loss_function`, read from the model's forward."""
    return {"loss_function": "chunked" if isinstance(model.forward, HeadLoss) else "full"}

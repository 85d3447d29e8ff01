"""The loss inside the model's forward, from the last hidden states, so that the logits are never whole.

The model's own forward runs with a head that returns its input: final norms, a transform before the head and a scale
stay the model's own, under any wrapper.
"""

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
    """The forward of a model that computes its loss too: called with the targets, it returns their loss."""

    name = "chunked"

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
        loss: Tensor = self._sum(self.states(*args, **inputs).logits.flatten(0, -2), targets.flatten())
        return loss

    # Compiled, the gradients of the head's weight would all be kept, one a chunk, to be added at once.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _sum(self, states: Tensor, targets: Tensor) -> Tensor:
        rows = -(-len(states) // CHUNKS)
        total = torch.zeros((), device=states.device)
        for start in range(0, len(states), rows):
            chunk = states[start : start + rows], targets[start : start + rows]
            total = total + checkpoint(self._loss, *chunk, use_reentrant=False, preserve_rng_state=False)
        return total

    def _loss(self, states: Tensor, targets: Tensor) -> Tensor:
        logits = functional.linear(states, self.head.weight, self.head.bias)
        if self.cap is not None:
            logits = self.cap * torch.tanh(logits / self.cap)
        # torch's own `ignore_index` is the data's label of a token that does not count.
        return functional.cross_entropy(logits.float(), targets, reduction="sum")


class FusedHeadLoss(HeadLoss):
    """The same by liger-kernel's fused product and cross entropy, whose class stands in for `fused`."""

    name = "liger"

    def __init__(self, model: Any, fused: Any) -> None:
        """Take the place of the forwards of `model` and of its head."""
        super().__init__(model)
        self.fused = fused(reduction="sum", softcap=self.cap)

    def _sum(self, states: Tensor, targets: Tensor) -> Tensor:
        if torch.is_autocast_enabled(states.device.type):
            states = states.to(torch.get_autocast_dtype(states.device.type))
        # Its kernels take one dtype, and autocast does not reach them.
        bias = None if self.head.bias is None else self.head.bias.to(states.dtype)
        loss: Tensor = self.fused(self.head.weight.to(states.dtype), states, targets, bias)
        return loss.float()


def _unchanged(states: Tensor) -> Tensor:
    return states


def chunk_loss(model: nn.Module, knobs: Knobs) -> None:
    """Compute the model's loss in chunks."""
    HeadLoss(model)


def fuse_loss(model: nn.Module, knobs: Knobs) -> None:
    """Compute the model's loss by liger-kernel."""
    from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss

    FusedHeadLoss(model, LigerFusedLinearCrossEntropyLoss)


def actual(model: nn.Module) -> dict[str, Any]:
    """Return `loss_function`, read from the model's forward."""
    # Accelerate puts its casts around a forward, and keeps it.
    forward = getattr(model, "_original_forward", model.forward)
    return {"loss_function": forward.name if isinstance(forward, HeadLoss) else "full"}

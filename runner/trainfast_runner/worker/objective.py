"""The loss of each objective, computed here from the logits so that every model and strategy shares one definition."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .data.samples import IGNORED, Batch


def inputs(batch: Batch) -> Batch:
    """What of a batch goes into the model: all but the labels, under the names of its forward."""
    return {name: values for name, values in batch.items() if name != "labels"}


def logits_of(outputs: Any) -> Tensor:
    """The scores in a model's outputs; PP-LCNet calls those of its classes `last_hidden_state`."""
    found: Tensor = outputs.logits if hasattr(outputs, "logits") else outputs.last_hidden_state
    return found


class Objective:
    """Summed cross entropy over the counted targets; whoever adds the micro-batches divides by the global count."""

    def __init__(self, name: str) -> None:
        self.shifts = name == "causal-lm"

    def targets(self, batch: Batch) -> Tensor:
        """What each logit is compared with: the labels, for a causal model those of the next position."""
        labels = batch["labels"]
        return functional.pad(labels[:, 1:], (0, 1), value=IGNORED) if self.shifts else labels

    def count(self, batches: list[Batch]) -> Tensor:
        """How many targets count in all of `batches`, as an int64 scalar on their device."""
        counts = [(self.targets(batch) != IGNORED).sum() for batch in batches]
        return torch.stack(counts).sum()

    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        """The sum of the targets' cross entropies, in fp32 whatever the model computes in."""
        return self.sum_of(logits_of(model(**inputs(batch))), self.targets(batch))

    def sum_of(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The sum of the cross entropies of `logits`, which have the targets' shape and the classes after it.

        Computed where the logits are, and brought to the targets' device.
        """
        loss = functional.cross_entropy(
            logits.flatten(0, -2).float(), targets.flatten().to(logits.device), ignore_index=IGNORED, reduction="sum"
        )
        return loss.to(targets.device)

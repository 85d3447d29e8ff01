"""The loss of each objective, computed from the logits, so that all models and strategies share one definition."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..data.samples import IGNORED_LABEL, Batch


def model_inputs(batch: Batch) -> Batch:
    """The model's inputs: everything in a batch but the labels, by the names of the model's forward."""
    return {name: values for name, values in batch.items() if name != "labels"}


def logits_of(outputs: Any) -> Tensor:
    """The logits in a model's outputs, which PP-LCNet calls `last_hidden_state`."""
    logits: Tensor = outputs.logits if hasattr(outputs, "logits") else outputs.last_hidden_state
    return logits


class Objective:
    """Cross entropy summed over the counted targets; the loop divides it by the targets of the global batch."""

    def __init__(self, name: str) -> None:
        self.shifts = name == "causal-lm"

    def targets(self, batch: Batch) -> Tensor:
        """The target of each logit: its label; for a causal model, the label of the next position."""
        labels = batch["labels"]
        return functional.pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL) if self.shifts else labels

    def count_targets(self, batches: list[Batch]) -> Tensor:
        """Number of targets that count in all of `batches`, as an int64 scalar on their device."""
        counts = [(self.targets(batch) != IGNORED_LABEL).sum() for batch in batches]
        return torch.stack(counts).sum()

    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        """Sum of the targets' cross entropies, in fp32 for every compute dtype."""
        return self.loss_of_logits(logits_of(model(**model_inputs(batch))), self.targets(batch))

    def loss_of_logits(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Sum of the cross entropies of `logits`, which have the targets' shape and a last dimension of classes.

        Computed on the logits' device, returned on the targets' device.
        """
        loss = functional.cross_entropy(
            logits.flatten(0, -2).float(),
            targets.flatten().to(logits.device),
            ignore_index=IGNORED_LABEL,
            reduction="sum",
        )
        return loss.to(targets.device)

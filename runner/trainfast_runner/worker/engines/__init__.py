"""Engines take the steps: the loop here, the short Accelerate loop, or the Hugging Face Trainer.

Each engine trains the same samples in the same global batches with the same loss and writes the same step records, so
that two engines differ in their speed only.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Protocol

from torch import nn
from torch.optim import Optimizer

from ..catalog import ENGINES
from ..data.samples import Batch
from ..objective import Objective
from ..recorder import StepRecorder
from ..spec import Knobs
from ..strategies.base import Strategy


class Engine(Protocol):
    """Everything that the start of a training knows about an engine."""

    name: str

    def prepare(self, model: nn.Module) -> None:
        """Initialize the weights, and wrap the model and optimizer unless the engine wraps them when it trains."""

    def live(self) -> tuple[nn.Module, Optimizer]:
        """Return the module and the optimizer as they are now."""

    def train(self, knobs: Knobs, batches: Iterator[Batch], recorder: StepRecorder) -> None:
        """Take `knobs.steps` optimizer steps. The last step's record is still pending at the end."""


def make_engine(knobs: Knobs, strategy: Strategy, objective: Objective) -> Engine:
    """The engine that the knobs name; its libraries are imported here, before any memory is counted."""
    module, _, name = ENGINES[knobs.engine].path.partition(":")
    made: Engine = getattr(importlib.import_module(f".{module}", __package__), name)(knobs, strategy, objective)
    return made

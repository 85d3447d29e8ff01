"""The loop of this package, which works with every strategy."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.optim import Optimizer

from .. import loop
from ..data.samples import Batch
from ..objective import Objective
from ..recorder import StepRecorder
from ..spec import Knobs
from ..strategies.base import Strategy


class Native:
    """Takes the steps with `loop.train`."""

    name = "native"

    def __init__(self, _knobs: Knobs, strategy: Strategy, objective: Objective) -> None:
        self.strategy = strategy
        self.objective = objective

    def prepare(self, model: nn.Module) -> None:
        """Let the strategy wrap the model and build the optimizer."""
        self.strategy.prepare(model)

    def live(self) -> tuple[nn.Module, Optimizer]:
        """Return the strategy's module and optimizer."""
        return self.strategy.module, self.strategy.optimizer

    def train(self, knobs: Knobs, batches: Iterator[Batch], recorder: StepRecorder) -> None:
        """Run the loop."""
        loop.train(knobs, self.strategy, self.objective, batches, recorder)

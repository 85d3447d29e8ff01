"""The engine `native`: the loop of this package, which works with every strategy. All other engines inherit from it."""

import importlib
from collections.abc import Iterator

from torch import nn
from torch.optim import Optimizer

from .. import loop
from ..catalog import ENGINES
from ..data.samples import Batch
from ..model.optimizer import Objective
from ..records.step_log import StepRecorder
from ..spec import Knobs
from ..strategies.base import Strategy


class Engine:
    """Takes the steps with `loop.train`; the other engines replace each method."""

    name = "native"

    def __init__(self, knobs: Knobs, strategy: Strategy, objective: Objective) -> None:
        self.knobs = knobs
        self.strategy = strategy
        self.objective = objective

    def prepare(self, model: nn.Module) -> None:
        """Initialize the weights, and wrap the model with its optimizer; some engines wrap only when they train."""
        self.strategy.prepare(model)

    def live(self) -> tuple[nn.Module, Optimizer]:
        """Return the module and the optimizer as they are now."""
        return self.strategy.module, self.strategy.optimizer

    def train(self, knobs: Knobs, batches: Iterator[Batch], recorder: StepRecorder) -> None:
        """Take `knobs.steps` optimizer steps. The last step's record is still pending at the end."""
        loop.train(knobs, self.strategy, self.objective, batches, recorder)


def make_engine(knobs: Knobs, strategy: Strategy, objective: Objective) -> Engine:
    """Make the engine that the knobs name; its libraries are imported here, before any memory is counted."""
    module, _, name = ENGINES[knobs.engine].path.partition(":")
    engine: Engine = getattr(importlib.import_module(f".{module}", __package__), name)(knobs, strategy, objective)
    return engine

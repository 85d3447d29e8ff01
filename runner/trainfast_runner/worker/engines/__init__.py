"""Engines take the steps: the loop here, the short Accelerate loop, or the Hugging Face Trainer.

Each engine trains the same samples in the same global batches with the same loss and writes the same step records, so
that two engines differ in their speed only.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from typing import Protocol

from torch import nn
from torch.optim import Optimizer

from ..catalog import ENGINES
from ..data.samples import Batch
from ..invalid import InvalidInput
from ..objective import Objective
from ..recorder import StepRecorder
from ..spec import Knobs
from ..strategies import Strategy


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
    """The engine that the knobs name; its libraries are imported here, before any memory is counted.

    Raises InvalidInput for what this engine would do differently than asked.
    """
    entry, asked = ENGINES[knobs.engine], f"engine={knobs.engine}"
    if not entry.runs(knobs.strategy):
        raise InvalidInput(
            f"{asked} runs {' and '.join(f'strategy={name}' for name in entry.strategies)},"
            f" not strategy={knobs.strategy}; engine={entry.fallback} runs it",
            "engine",
            [name for name, other in ENGINES.items() if other.runs(knobs.strategy)],
            entry.fallback,
        )
    if knobs.compile != "off" and not entry.compiles:
        raise InvalidInput(
            f"{asked} does not run with compile={knobs.compile}; engine={entry.fallback} does", "compile", ["off"]
        )
    if knobs.precision == "fp16" and strategy.device.type == "cpu" and not entry.fp16_on_cpu:
        raise InvalidInput(
            f"{asked} trains in fp32 when asked for precision=fp16 on a CPU; engine={entry.fallback} scales and casts"
            " there",
            "precision",
            ["fp32", "bf16", "bf16-pure"],
            "bf16",
        )
    module, _, name = entry.path.partition(":")
    try:
        made: Engine = getattr(importlib.import_module(f".{module}", __package__), name)(knobs, strategy, objective)
    except ImportError as error:
        if entry.package is None:
            raise
        raise InvalidInput(
            f"{asked} needs the package {entry.package}: {sys.executable} -m pip install {entry.package}",
            "engine",
            [entry.fallback],
        ) from error
    return made

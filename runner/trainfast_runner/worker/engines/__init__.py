"""Who takes the steps: the loop here, the short Accelerate loop, or the Hugging Face Trainer.

Each engine trains the same samples in the same global batches with the same loss and writes the same step records, so
that what differs between two engines is their speed.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from ..catalog import ENGINES
from ..invalid import InvalidInput
from ..precision import Precision
from ..spec import Knobs
from ..strategies import Strategy

if TYPE_CHECKING:
    from ..loop import Rig


class Engine(Protocol):
    """What the session needs from an engine."""

    name: str

    def prepare(self, model: nn.Module) -> tuple[nn.Module, Optimizer]:
        """The module and the optimizer that the training will use, as far as the engine makes them beforehand."""

    def live(self) -> tuple[nn.Module, Optimizer]:
        """The module and the optimizer as they are now: what is on record as having run."""

    def train(self, rig: Rig) -> None:
        """Take `steps` optimizer steps. The last one's record is still pending at the end."""


def make_engine(knobs: Knobs, strategy: Strategy, device: torch.device, precision: Precision) -> Engine:
    """The engine that the knobs name; its libraries are imported here, before any memory is counted.

    Raises InvalidInput for what this engine would do differently than asked.
    """
    entry, asked = ENGINES[knobs.engine], f"engine={knobs.engine}"
    if not entry.runs(knobs.strategy):
        raise InvalidInput(
            f"{asked} runs {' and '.join(f'strategy={name}' for name in entry.strategies)},"
            f" not strategy={knobs.strategy}; engine={entry.instead} runs it",
            "engine",
            [name for name, other in ENGINES.items() if other.runs(knobs.strategy)],
            entry.instead,
        )
    if knobs.compile != "off" and not entry.compiles:
        raise InvalidInput(
            f"{asked} does not run with compile={knobs.compile}; engine={entry.instead} does", "compile", ["off"]
        )
    if knobs.precision == "fp16" and device.type == "cpu" and not entry.fp16_on_cpu:
        raise InvalidInput(
            f"{asked} trains in fp32 when asked for precision=fp16 on a CPU; engine={entry.instead} scales and casts"
            " there",
            "precision",
            ["fp32", "bf16", "bf16-pure"],
            "bf16",
        )
    module, _, name = entry.path.partition(":")
    try:
        made: Engine = getattr(importlib.import_module(f".{module}", __package__), name)(
            knobs, strategy, device, precision
        )
    except ImportError as error:
        if entry.package is None:
            raise
        raise InvalidInput(
            f"{asked} needs the package {entry.package}: {sys.executable} -m pip install {entry.package}",
            "engine",
            [entry.instead],
        ) from error
    return made

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

from ..invalid import InvalidInput
from ..precision import Precision
from ..spec import Knobs
from ..strategies import Strategy

if TYPE_CHECKING:
    from ..loop import Rig

STRATEGIES_OF_OTHERS = ("single", "ddp")
"""What Accelerate and the Trainer are driven with here. Asked for FSDP on a CPU both train DDP without a word."""


class Engine(Protocol):
    """What the session needs from an engine."""

    name: str

    def prepare(self, model: nn.Module) -> tuple[nn.Module, Optimizer]:
        """The module and the optimizer that the training will use, as far as the engine makes them beforehand."""

    def live(self) -> tuple[nn.Module, Optimizer]:
        """The module and the optimizer as they are now: what is on record as having run."""

    def train(self, rig: Rig) -> None:
        """Take `steps` optimizer steps. The last one's record is still pending at the end."""


class Native:
    """The loop of this package, which any strategy plugs into."""

    name = "native"

    def __init__(self, knobs: Knobs, strategy: Strategy, device: torch.device, precision: Precision) -> None:
        self.knobs = knobs
        self.strategy = strategy

    def prepare(self, model: nn.Module) -> tuple[nn.Module, Optimizer]:
        """As the strategy does it."""
        self._live = self.strategy.prepare(model, self.knobs)
        return self._live

    def live(self) -> tuple[nn.Module, Optimizer]:
        """Nothing changes after `prepare`."""
        return self._live

    def train(self, rig: Rig) -> None:
        """One step after the other."""
        from ..loop import train

        train(rig)


ENGINES = {"accelerate": ("accelerate_loop", "AccelerateLoop"), "trainer": ("hf_trainer", "HfTrainer")}
"""File and class of the engines that are imported only when they run."""


def make_engine(knobs: Knobs, strategy: Strategy, device: torch.device, precision: Precision) -> Engine:
    """The engine the knobs name; its libraries are imported here, before any memory is counted.

    Raises InvalidInput for what another engine than the native one would do differently than asked.
    """
    if knobs.engine == "native":
        return Native(knobs, strategy, device, precision)
    asked = f"engine={knobs.engine}"
    if knobs.strategy not in STRATEGIES_OF_OTHERS:
        raise InvalidInput(
            f"{asked} runs strategy=single and strategy=ddp, not strategy={knobs.strategy}; engine=native runs it",
            "engine",
            STRATEGIES_OF_OTHERS,
            "native",
        )
    if knobs.compile != "off":
        raise InvalidInput(f"{asked} does not run with compile={knobs.compile}; engine=native does", "compile", ["off"])
    if knobs.precision == "fp16" and device.type == "cpu":
        raise InvalidInput(
            f"{asked} trains in fp32 when asked for precision=fp16 on a CPU; engine=native scales and casts there",
            "precision",
            ["fp32", "bf16", "bf16-pure"],
            "bf16",
        )
    file, name = ENGINES[knobs.engine]
    try:
        made: Engine = getattr(importlib.import_module(f".{file}", __package__), name)(
            knobs, strategy, device, precision
        )
    except ImportError as error:
        raise InvalidInput(
            f"{asked} needs the package accelerate: {sys.executable} -m pip install accelerate", "engine", ["native"]
        ) from error
    return made

"""The facts that a rule may look at."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trainfast_runner.machine.devices import Machine
from trainfast_runner.settings.device_counts import device_count, world_size
from trainfast_runner.settings.knob_type import KnobValues
from trainfast_runner.settings.spec import RunSpec
from trainfast_runner.worker.catalog import (
    ENGINES,
    OPTIMIZERS,
    STRATEGIES,
    EngineEntry,
    OptimizerEntry,
    StrategyEntry,
)


@dataclass(frozen=True)
class Facts:
    """The settings asked for, the machine, the model's configuration and the installed packages.

    `machine` is the one that the run uses (`Machine.used_by`).
    """

    spec: RunSpec
    machine: Machine
    config: Mapping[str, Any]
    versions: Mapping[str, str | None]
    python: str
    attentions: tuple[str, ...] | None = None
    """Values of `attention` that the model has; None when unknown."""

    @property
    def knobs(self) -> KnobValues:
        """The knobs asked for."""
        return self.spec.knobs

    @property
    def strategy(self) -> StrategyEntry:
        """The catalog's entry of the strategy."""
        return STRATEGIES[str(self.knobs["strategy"])]

    @property
    def optimizer(self) -> OptimizerEntry:
        """The catalog's entry of the optimizer."""
        return OPTIMIZERS[str(self.knobs["optimizer"])]

    @property
    def engine(self) -> EngineEntry:
        """The catalog's entry of the engine."""
        return ENGINES[str(self.knobs["engine"])]

    @property
    def rank_count(self) -> int:
        """Number of processes the run starts."""
        return world_size(self.spec, self.machine)

    @property
    def device_count(self) -> int:
        """Number of devices the run uses."""
        return device_count(self.spec, self.machine)


Rule = Callable[[Facts], None]
"""Raises UserError for settings that cannot work together."""

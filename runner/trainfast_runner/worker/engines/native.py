"""The loop of this package, which any strategy plugs into."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.optim import Optimizer

from ..precision import Precision
from ..spec import Knobs
from ..strategies import Strategy

if TYPE_CHECKING:
    from ..loop import Rig


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

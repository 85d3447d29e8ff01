"""The training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .clock import Clock, StepTimes
from .data.samples import Batch
from .memory import Memory
from .objective import Objective
from .optimizer import rate_at
from .precision import Precision
from .records import Journal
from .spec import Knobs
from .strategies import Strategy


class Log(Protocol):
    """What takes the steps' figures."""

    def add(
        self, step: int, times: StepTimes, loss: Tensor, handle: Any, scale: Tensor | None, fields: dict[str, Any]
    ) -> None:
        """Note step `step` (from 1); `loss` is being summed over ranks until `handle`, if any, is ready."""


@dataclass(frozen=True)
class Rig:
    """Everything a step touches."""

    knobs: Knobs
    device: torch.device
    module: nn.Module
    optimizer: Optimizer
    objective: Objective
    precision: Precision
    strategy: Strategy
    batches: Iterator[Batch]
    clock: Clock
    memory: Memory
    log: Log
    journal: Journal
    after_first_step: Callable[[], None]


def train(rig: Rig) -> None:
    """Take `steps` optimizer steps. The step's last record is still pending at the end: flush the log."""
    for step in range(1, rig.knobs.steps + 1):
        rig.journal.step = step
        rate = rate_at(step, rig.knobs)
        for group in rig.optimizer.param_groups:
            group["lr"] = rate
        loss = rig.strategy.accumulate(rig)
        rig.memory.boundary("forward_backward")
        enter(rig, "optimizer")
        rig.strategy.update(rig)
        rig.memory.boundary("optimizer")
        enter(rig, "other")
        handle = rig.strategy.sum_later(loss)
        times = rig.clock.end_step()
        rig.log.add(step, times, loss, handle, rig.precision.scale(), {"lr": rate, **rig.memory.read()})
        if step == 1:
            rig.after_first_step()


def enter(rig: Rig, phase: str) -> None:
    """A phase of the step begins: for the clock, and for the record of an exception raised in it."""
    rig.clock.enter(phase)
    rig.journal.phase = "train" if phase == "other" else phase


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch on the device; from pinned memory the copy does not hold the host up."""
    return {name: values.to(device, non_blocking=True) for name, values in batch.items()}

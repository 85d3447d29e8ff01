"""The training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .clock import Clock
from .memory import Memory
from .objective import Objective
from .optimizer import rate_at
from .precision import Precision
from .records import Journal
from .samples import Batch
from .spec import Knobs
from .step_log import StepLog
from .strategies import Strategy


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
    log: StepLog
    journal: Journal
    after_first_step: Callable[[], None]


def train(rig: Rig) -> None:
    """Take `steps` optimizer steps. The step's last record is still pending at the end: flush the log."""
    for step in range(1, rig.knobs.steps + 1):
        rig.journal.step = step
        rate = rate_at(step, rig.knobs)
        for group in rig.optimizer.param_groups:
            group["lr"] = rate
        loss = accumulate_gradients(rig)
        rig.memory.boundary("forward_backward")
        enter(rig, "optimizer")
        update(rig)
        rig.memory.boundary("optimizer")
        enter(rig, "other")
        handle = rig.strategy.sum_later(loss)
        times = rig.clock.end_step()
        rig.log.add(step, times, loss, handle, rig.precision.scale(), {"lr": rate, **rig.memory.read()})
        if step == 1:
            rig.after_first_step()


def accumulate_gradients(rig: Rig) -> Tensor:
    """Forward and backward of every micro-batch; returns this rank's share of the global mean loss.

    Every target of the global batch weighs the same, whichever rank and micro-batch it is in, so all are counted
    before the first forward.
    """
    enter(rig, "data")
    micro_batches = [to_device(next(rig.batches), rig.device) for _ in range(rig.knobs.grad_accum)]
    enter(rig, "other")
    count = rig.strategy.sum(rig.objective.count(micro_batches)).clamp(min=1)
    total = torch.zeros((), device=rig.device)
    for number, batch in enumerate(micro_batches, start=1):
        with rig.strategy.micro_step(rig.module, last=number == len(micro_batches)):
            enter(rig, "forward")
            with rig.precision.autocast():
                loss = rig.objective.loss_sum(rig.module, batch) / count
            enter(rig, "backward")
            rig.precision.backward(loss * rig.strategy.gradient_factor)
        total += loss.detach()
    return total


def update(rig: Rig) -> None:
    """Clip where asked, take the optimizer's step, and free the gradients."""
    if rig.knobs.grad_clip > 0:
        rig.precision.unscale(rig.optimizer)
        rig.strategy.clip(rig.module.parameters(), rig.knobs.grad_clip)
    rig.precision.step(rig.optimizer)
    rig.optimizer.zero_grad(set_to_none=True)


def enter(rig: Rig, phase: str) -> None:
    """A phase of the step begins: for the clock, and for the record of an exception raised in it."""
    rig.clock.enter(phase)
    rig.journal.phase = "train" if phase == "other" else phase


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch on the device; from pinned memory the copy does not hold the host up."""
    return {name: values.to(device, non_blocking=True) for name, values in batch.items()}

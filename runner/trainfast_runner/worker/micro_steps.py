"""One optimizer step out of micro-batches, for every strategy that calls the model as a module."""

from __future__ import annotations

import torch
from torch import Tensor

from .loop import Rig, enter, to_device


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
            rig.strategy.backward(rig, loss)
        total += loss.detach()
    return total


def update(rig: Rig) -> None:
    """Clip where asked, take the optimizer's step, and free the gradients."""
    if rig.knobs.grad_clip > 0:
        rig.precision.unscale(rig.optimizer)
        rig.strategy.clip(rig.module.parameters(), rig.knobs.grad_clip)
    rig.precision.step(rig.optimizer)
    rig.optimizer.zero_grad(set_to_none=True)

"""The training loop on one page: data, forward, backward, optimizer step, all-reduce.

`strategies/` says how ranks share each of these, `records/step_log.py` turns the phases named here into step records.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice

import torch
from torch import Tensor

from .data.samples import Batch
from .model.optimizer import Objective, rate_at, set_rate
from .records.step_log import StepRecorder
from .spec import Knobs
from .strategies.base import Strategy


def train(
    knobs: Knobs, strategy: Strategy, objective: Objective, batches: Iterator[Batch], recorder: StepRecorder
) -> None:
    """Take `knobs.steps` optimizer steps. The last step's record is still pending at the end: flush the log."""
    for step in range(1, knobs.steps + 1):
        recorder.begin_step(step)
        rate = rate_at(step, knobs)
        set_rate(strategy.optimizer, rate)

        loss = forward_backward(strategy, objective, islice(batches, knobs.grad_accum), recorder.enter)

        recorder.enter("optimizer")
        strategy.optimizer_step()

        recorder.enter("other")
        reduced = strategy.all_reduce_async(loss)
        recorder.end_step(loss, reduced, strategy.precision.scale(), rate)


def forward_backward(
    strategy: Strategy, objective: Objective, micro_batches: Iterable[Batch], enter: Callable[[str], None]
) -> Tensor:
    """Accumulate the gradients of one step, and return this rank's share of the global mean loss.

    Every target of the global batch has the same weight, whichever rank and micro-batch it is in, so the targets of
    all ranks are counted before the first forward.
    """
    enter("data")
    batches = [to_device(batch, strategy.device) for batch in micro_batches]
    enter("other")
    targets = strategy.all_reduce(objective.count_targets(batches)).clamp(min=1)
    if strategy.forward_backward is not None:
        return strategy.forward_backward(batches, targets, objective, enter)

    total = torch.zeros((), device=strategy.device)
    for number, batch in enumerate(batches, start=1):
        with strategy.sync_context(is_last=number == len(batches)):
            enter("forward")
            with strategy.precision.autocast():
                loss = objective.loss_sum(strategy.module, batch) / targets
            enter("backward")
            strategy.backward(loss)
        total += loss.detach()
    return total


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Copy the batch to the device; from pinned memory without blocking the host."""
    return {name: values.to(device, non_blocking=True) for name, values in batch.items()}

"""The work of an optimizer step, put together from the traced segments for any batch and accumulation."""

from __future__ import annotations

from typing import NamedTuple

from trainfast_runner.memory.model import MemoryModel
from trainfast_runner.memory.timeline import blocks_of
from trainfast_runner.worker.shared.traced import TRACED_MICRO_BATCHES


class StepWork(NamedTuple):
    """Work of one rank: calls of operations, FLOPs of products, bytes read and written."""

    calls: float
    flops: float
    moved_bytes: float


def step_work(model: MemoryModel, batch_size: int, grad_accum: int) -> StepWork:
    """Return the work of an optimizer step with `grad_accum` micro-batches of `batch_size` samples.

    As one rank does it alone: without communication, and without the work that sharding saves or adds.
    """
    total = list(model.optimizer_work)
    for segment in model.segments:
        times = blocks_of(segment, model.stacks).copies * _times(segment.micro, segment.phase, grad_accum)
        for index, (fixed, per_sample) in enumerate(zip(*segment.work, strict=True)):
            total[index] += times * (fixed + batch_size * per_sample)
    return StepWork(*total)


def _times(micro: int, phase: str, grad_accum: int) -> float:
    """Occurrences of a traced segment in a step: the last traced micro-batch stands for all that follow it."""
    if phase == "data":
        return grad_accum / TRACED_MICRO_BATCHES
    return max(0, grad_accum - TRACED_MICRO_BATCHES + 1) if micro == TRACED_MICRO_BATCHES else 1

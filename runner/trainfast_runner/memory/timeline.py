"""The timeline of a step's live bytes, put together from its traced segments for any depth, batch and accumulation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from trainfast_runner.worker.shared.words import NO_WORK, TRACED_CATEGORIES, TRACED_MICRO_BATCHES

Vector = tuple[float, ...]
"""Bytes by category, in the order of TRACED_CATEGORIES."""
Work = tuple[float, float, float]
"""Calls of operations, FLOPs, bytes moved."""
NO_BYTES: Vector = (0.0,) * len(TRACED_CATEGORIES)
MIDDLE_BLOCK = 1
"""Index of the traced block that stands for all between the first and the last."""


class RankBytes(NamedTuple):
    """Bytes of one rank by category: those of a trace (TRACED_CATEGORIES, in their order), and those it exchanges."""

    params: float = 0.0
    grads: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    temporary: float = 0.0
    communication: float = 0.0


CATEGORIES = RankBytes._fields
"""Categories of a peak; a prediction has `NAME_bytes` of each."""


class BlockStack(msgspec.Struct, frozen=True):
    """A stack of blocks: parameters of each, and how many were traced (all of them, or first, middle and last)."""

    kept: int
    sizes: list[int]

    @property
    def count(self) -> int:
        """Blocks of the model itself."""
        return len(self.sizes)


class Segment(msgspec.Struct, frozen=True):
    """A part of the traced step between two marks.

    Bytes are relative to the segment's start and linear in the batch: (fixed, per sample). So is `work`.
    """

    phase: str
    micro: int
    traced_block: str = msgspec.field(name="place")
    """The traced block as "STACK:INDEX"; empty outside of all blocks."""
    lines: list[tuple[Vector, Vector]]
    """The moments that can be the segment's peak at some batch size."""
    delta: tuple[Vector, Vector]
    """The segment's end."""
    work: tuple[Work, Work] = (NO_WORK, NO_WORK)


class BlockPosition(NamedTuple):
    """A block of the model itself, in the forward or the backward."""

    stack: int
    block: int
    backward: bool


class Moment(NamedTuple):
    """Live bytes by category that may be the peak, and their moment in the step."""

    live: Vector
    position: BlockPosition | None
    """The block that runs; None outside of all blocks."""
    micro: int
    backward: bool
    is_last: bool = False
    """True at the end of the last backward."""


def moments(
    segments: list[Segment],
    stacks: list[BlockStack],
    start: Vector,
    batch: float,
    micro_batches: int,
) -> Iterator[Moment]:
    """Yield each moment of forward and backward that may be the peak with `batch` samples a micro-batch, then the end.

    `start` is the live bytes before the step. The last traced micro-batch stands for all that follow it.
    """
    level = start
    for segment in segments:
        if segment.micro > micro_batches:
            break
        share = micro_batches / TRACED_MICRO_BATCHES if segment.phase == "data" else 1.0
        blocks = blocks_of(segment, stacks)
        backward = segment.phase == "backward"
        delta = _live_at(segment.delta, batch, share)
        peaks = [_live_at(line, batch, share) for line in segment.lines]
        # Live bytes are linear in the copy's number, so only the first and the last copy can hold the peak.
        for copy in dict.fromkeys((0, blocks.copies - 1)):
            block = blocks.first + (blocks.copies - 1 - copy if backward else copy)
            position = None if blocks.stack is None else BlockPosition(blocks.stack, block, backward)
            base = add(level, delta, copy)
            yield Moment(base, position, segment.micro, backward)
            for peak in peaks:
                yield Moment(add(base, peak), position, segment.micro, backward)
        level = add(level, delta, blocks.copies)
    yield Moment(level, None, micro_batches, True, is_last=True)


class Blocks(NamedTuple):
    """The blocks of the model that a traced segment stands for; `stack` is None outside of all stacks."""

    stack: int | None
    copies: int
    first: int


def blocks_of(segment: Segment, stacks: list[BlockStack]) -> Blocks:
    """The blocks that a segment stands for: one, or for the middle one of a shortened stack all between its ends."""
    if not segment.traced_block:
        return Blocks(None, 1, 0)
    number, index = (int(part) for part in segment.traced_block.split(":"))
    stack = stacks[number]
    if stack.kept == stack.count:
        return Blocks(number, 1, index)
    copies = stack.count - stack.kept + 1
    if index == MIDDLE_BLOCK:
        return Blocks(number, copies, index)
    return Blocks(number, 1, index if index < MIDDLE_BLOCK else index + copies - 1)


def _live_at(line: tuple[Vector, Vector], batch: float, share: float) -> Vector:
    return tuple((fixed + batch * per_sample) * share for fixed, per_sample in zip(*line, strict=True))


def add(live: Vector, delta: Vector, times: int = 1) -> Vector:
    """Return `live` plus `times` times `delta`."""
    return tuple(a + times * b for a, b in zip(live, delta, strict=True))

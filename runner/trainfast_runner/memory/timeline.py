"""A traced model, and the timeline of its step's live bytes, put together for any depth, batch and accumulation."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import msgspec

from trainfast_runner.worker.shared import words

Vector = tuple[float, ...]
"""Bytes by category, in the order of TRACED_CATEGORIES."""
Work = tuple[float, float, float]
"""Calls of operations, FLOPs, bytes moved."""
NO_BYTES: Vector = (0.0,) * len(words.TRACED_CATEGORIES)
MIDDLE_BLOCK = 1
"""Index of the traced block that stands for all between the first and the last."""
FP32_BYTES = 4


class RankBytes(NamedTuple):
    """Bytes of one rank by category: those of a trace (TRACED_CATEGORIES, in their order), and those it exchanges."""

    params: float = 0.0
    grads: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    temporary: float = 0.0
    frozen: float = 0.0
    quantized: float = 0.0
    communication: float = 0.0


CATEGORIES = RankBytes._fields
"""Categories of a peak; a prediction has `NAME_bytes` of each."""


class BlockStack(msgspec.Struct, frozen=True):
    """A stack of blocks: parameters of each, and how many were traced (all of them, or first, middle and last)."""

    kept: int
    sizes: list[int]
    period: int = 1
    """Number of blocks in the middle, which repeat."""

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
    work: tuple[Work, Work] = (words.NO_WORK, words.NO_WORK)


class StageCut(msgspec.Struct, frozen=True):
    """One stage of the model."""

    begin: int
    """Index of the first block."""
    end: int
    """Index after that of the last block."""
    elements: int
    """Elements of all parameters of the stage."""
    largest: int
    """Elements of the largest parameter."""


class PipelineCut(msgspec.Struct, frozen=True):
    """The worker's cut of the model into stages."""

    stages: list[StageCut]
    tied: int
    """Elements of the parameters that are on the first and on the last stage."""
    hidden: int
    """Elements per sample of the tensors between stages."""
    output: int
    """Elements per sample of the logits."""
    head: int | None = None
    """The stage that computes the logits; None for the last."""


class BlockPosition(NamedTuple):
    """A block of the model itself."""

    stack: int
    block: int


class StepTrace(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Forward and backward of a model, and its division into blocks and stages."""

    parameter_sizes: list[int]
    """Elements of each parameter."""
    stacks: list[BlockStack]
    segments: list[Segment]
    pipeline: PipelineCut | None = None
    """The model's cut into stages; None if it was not traced for them."""
    unused: list[str] = []
    """The parameters that get no gradient, and so no optimizer state."""
    library_bytes: int = 0
    """Workspaces that libraries keep in a GPU's allocator from the first step on, whatever the batch."""
    attention: str = ""
    """The attention kernel that the trace ran, and the reason that `attention=auto` took it."""


class WholeModel(StepTrace, frozen=True, kw_only=True, dict=True):
    """A model in one process, at one sequence length, precision, optimizer, attention, checkpointing and objective."""

    device: str
    before_optimizer: list[float]
    """Live bytes by category of the whole model before the optimizer's step."""
    optimizer_peak: list[float]
    """Live bytes by category of the whole model at the peak of the optimizer's step."""

    @cached_property
    def parameters(self) -> int:
        """Elements of all parameters."""
        return sum(self.parameter_sizes)

    @cached_property
    def weight_width(self) -> float:
        """Bytes of one weight."""
        return self._weight_bytes / max(1, self.parameters)

    @cached_property
    def _weight_bytes(self) -> float:
        return sum(self.before_optimizer[index] for index in words.WEIGHTS)

    @cached_property
    def trained_share(self) -> float:
        """Share of the weights that is trained: 1 without frozen ones."""
        return self.before_optimizer[words.PARAMS] / max(1, self._weight_bytes)

    @cached_property
    def gradient_width(self) -> float:
        """Bytes of one gradient."""
        return self.before_optimizer[words.GRADS] / max(1, self.parameters * self.trained_share)

    @cached_property
    def block_sizes(self) -> list[int]:
        """Elements of every block, stack after stack."""
        return [size for stack in self.stacks for size in stack.sizes]

    @cached_property
    def outside_blocks(self) -> int:
        """Elements of the embeddings and the head."""
        return max(0, self.parameters - sum(self.block_sizes))

    @cached_property
    def largest_parameter(self) -> int:
        """Elements of the largest parameter."""
        return max(self.parameter_sizes, default=0)

    def size_after(self, position: BlockPosition) -> int:
        """Elements of the blocks after this position: their backward is over when the backward reaches it."""
        in_stack = sum(self.stacks[position.stack].sizes[position.block + 1 :])
        return in_stack + sum(sum(later.sizes) for later in self.stacks[position.stack + 1 :])


class Moment(NamedTuple):
    """Live bytes by category that may be the peak, and their moment in the step."""

    live: Vector
    phase: str
    """data, forward, backward, end for the end of the last backward, or optimizer."""
    position: BlockPosition | None = None
    """The block that runs; None outside of all blocks."""
    micro: int = 1

    @property
    def in_backward(self) -> bool:
        """True from the start of a backward to its end."""
        return self.phase in ("backward", "end")


def moments(
    segments: list[Segment], stacks: list[BlockStack], start: Vector, batch: float, micro_batches: int
) -> Iterator[Moment]:
    """Yield each moment of forward and backward that may be the peak with `batch` samples a micro-batch, then the end.

    `start` is the live bytes before the step. The last traced micro-batch stands for all that follow it.
    """
    level = start
    for period in _periods(segments, stacks):
        if period[0].micro > micro_batches:
            break
        share = micro_batches / words.TRACED_MICRO_BATCHES if period[0].phase == "data" else 1.0
        copies, change = blocks_of(period[0], stacks).copies, NO_BYTES
        for segment in period:
            change = add(change, _live_at(segment.delta, batch, share))
        # Live bytes are linear in the copy's number, so only the first and the last copy can hold the peak.
        for copy in dict.fromkeys((0, copies - 1)):
            base = add(level, change, copy)
            for segment in period:
                blocks = blocks_of(segment, stacks)
                step = blocks.period * (copies - 1 - copy if segment.phase == "backward" else copy)
                position = None if blocks.stack is None else BlockPosition(blocks.stack, blocks.first + step)
                for peak in (NO_BYTES, *(_live_at(line, batch, share) for line in segment.lines)):
                    yield Moment(add(base, peak), segment.phase, position, segment.micro)
                base = add(base, _live_at(segment.delta, batch, share))
        level = add(level, change, copies)
    yield Moment(level, "end", None, micro_batches)


def _periods(segments: list[Segment], stacks: list[BlockStack]) -> Iterator[list[Segment]]:
    """Yield the segments, those of one stack's repeated blocks together."""
    period: list[Segment] = []
    for segment in segments:
        blocks, last = blocks_of(segment, stacks), blocks_of(period[-1], stacks) if period else None
        repeats = last is not None and last.copies > 1 and (blocks.stack, blocks.copies) == (last.stack, last.copies)
        if period and not (repeats and (segment.phase, segment.micro) == (period[-1].phase, period[-1].micro)):
            yield period
            period = []
        period.append(segment)
    if period:
        yield period


class Blocks(NamedTuple):
    """The blocks of the model that a traced segment stands for; `stack` is None outside of all stacks."""

    stack: int | None
    copies: int
    first: int
    period: int = 1
    """The number of blocks from one copy to the next."""


def blocks_of(segment: Segment, stacks: list[BlockStack]) -> Blocks:
    """The blocks that a segment stands for: one, or for the middle one of a shortened stack all between its ends."""
    if not segment.traced_block:
        return Blocks(None, 1, 0)
    number, index = (int(part) for part in segment.traced_block.split(":"))
    left_out, period = stacks[number].count - stacks[number].kept, stacks[number].period
    if MIDDLE_BLOCK <= index < MIDDLE_BLOCK + period and left_out:
        return Blocks(number, left_out // period + 1, index, period)
    return Blocks(number, 1, index if index < MIDDLE_BLOCK else index + left_out)


def _live_at(line: tuple[Vector, Vector], batch: float, share: float) -> Vector:
    return tuple((fixed + batch * per_sample) * share for fixed, per_sample in zip(*line, strict=True))


def add(live: Vector, delta: Vector, times: int = 1) -> Vector:
    """Return `live` plus `times` times `delta`."""
    return tuple(a + times * b for a, b in zip(live, delta, strict=True))

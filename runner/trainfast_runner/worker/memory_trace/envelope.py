"""Straight lines through the traces of two batch sizes, which give the live bytes at any batch size."""

from __future__ import annotations

from typing import Any

from .live_bytes import Bytes, TracedSegment
from .step_work import Work

Line = tuple[tuple[float, ...], tuple[float, ...]]
"""Bytes by category, or work by kind: fixed, and for each sample of the batch."""
TRACED_BATCH_SIZES = (2, 4)
"""Batch sizes that are traced. Not 1: with one sample some copies are views."""


class TimelinesDiffer(Exception):
    """The two timelines have different operations: there are no lines through them."""


def segment_lines(
    small: list[TracedSegment], large: list[TracedSegment], batches: tuple[int, int]
) -> list[dict[str, Any]]:
    """Return one row for each segment.

    `lines` are the highest live bytes above its start, and `delta` is the change from its start to its end. `work` is
    the segment's, fixed and for each sample. `small` and `large` are the timelines at the two `batches`.

    Raises TimelinesDiffer.
    """
    if [_key(segment) for segment in small] != [_key(segment) for segment in large]:
        raise TimelinesDiffer("the step has other operations at another batch size")
    rows = []
    for low, high in zip(small, large, strict=True):
        points = _pairs_of_points(low, high)
        lines = [_line((_above(a, low.start), _above(b, high.start)), batches) for a, b in points]
        rows.append(
            {
                "phase": low.phase,
                "micro": low.micro,
                "place": low.place,
                "lines": envelope(lines),
                "delta": _line((_above(low.end, low.start), _above(high.end, high.start)), batches),
                "work": _line((low.work, high.work), batches),
            }
        )
    return rows


def _pairs_of_points(low: TracedSegment, high: TracedSegment) -> list[tuple[Bytes, Bytes]]:
    """The points of a segment in both timelines; the highest of each where the operations differ."""
    if len(low.points) == len(high.points):
        return list(zip(low.points, high.points, strict=True))
    return [(max(low.points, key=sum), max(high.points, key=sum))] if low.points and high.points else []


def extrapolate_blocks(low: TracedSegment, high: TracedSegment, extra_blocks: int) -> tuple[list[int], list[int]]:
    """Live bytes at the start and at the peak with `extra_blocks` more blocks than `low`; `high` has one more.

    Each identical block adds the same bytes to an operation on all blocks, and none to one on a single parameter.
    """
    pairs = [(low.start, high.start), *_pairs_of_points(low, high)]
    extended = [[a + extra_blocks * (b - a) for a, b in zip(few, many, strict=True)] for few, many in pairs]
    return extended[0], max(extended, key=sum)


def extrapolate_work(low: TracedSegment, high: TracedSegment, extra_blocks: int) -> Work:
    """The work with `extra_blocks` more blocks than `low`; `high` has one more."""
    calls, flops, moved = (a + extra_blocks * (b - a) for a, b in zip(low.work, high.work, strict=True))
    return calls, flops, moved


def envelope(lines: list[Line]) -> list[Line]:
    """The lines whose total is the largest at some batch size from 1 up, the flattest first."""
    best: dict[float, Line] = {}
    for line in lines:
        slope = sum(line[1])
        if slope not in best or sum(best[slope][0]) < sum(line[0]):
            best[slope] = line
    hull: list[Line] = []
    for slope in sorted(best):
        line = best[slope]
        while hull and _at(hull[-1], 1) <= _at(line, 1):
            hull.pop()  # flatter, and below already at one sample
        while len(hull) > 1 and _meet(hull[-2], line) <= _meet(hull[-2], hull[-1]):
            hull.pop()
        hull.append(line)
    return hull


def _meet(flat: Line, steep: Line) -> float:
    """The batch size at which the steeper line reaches the flatter."""
    return (sum(flat[0]) - sum(steep[0])) / (sum(steep[1]) - sum(flat[1]))


def _at(line: Line, batch: float) -> float:
    return sum(line[0]) + batch * sum(line[1])


def _line(values: tuple[tuple[float, ...], tuple[float, ...]], batches: tuple[int, int]) -> Line:
    """The line through the values at two batch sizes."""
    (low, high), (few, many) = values, batches
    per_sample = tuple((b - a) / (many - few) for a, b in zip(low, high, strict=True))
    return tuple(a - few * slope for a, slope in zip(low, per_sample, strict=True)), per_sample


def _above(bytes_: Bytes, start: Bytes) -> Bytes:
    return tuple(a - b for a, b in zip(bytes_, start, strict=True))


def _key(segment: TracedSegment) -> tuple[str, int, str]:
    return segment.phase, segment.micro, segment.place

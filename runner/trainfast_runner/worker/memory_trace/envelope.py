"""Lines through the timelines of two batch sizes: live bytes at any batch size, where they can be the peak."""

from __future__ import annotations

from typing import Any

from .live_bytes import Bytes, TracedSegment
from .step_work import Work

Line = tuple[tuple[float, ...], tuple[float, ...]]
"""Bytes by category, or work by kind: fixed, and for each sample of the batch."""


BATCHES = (2, 4)
"""Batch sizes that are traced. Not 1: with one sample some copies are views."""


class TimelinesDiffer(Exception):
    """The two timelines have different operations: there are no lines through them."""


def affine(first: list[TracedSegment], second: list[TracedSegment], few: int, many: int) -> list[dict[str, Any]]:
    """Each segment's `lines` above its start, those that are the peak at some batch size, and its `delta` to its end.

    `work` is the segment's, fixed and for each sample. `first` is the timeline with `few` samples, `second` that with
    `many`. Raises TimelinesDiffer.
    """
    _check(first, second)
    rows = []
    for one, other in zip(first, second, strict=True):
        lines = [_line(_above(a, one.start), _above(b, other.start), few, many) for a, b in _pairs(one, other)]
        delta = _line(_above(one.end, one.start), _above(other.end, other.start), few, many)
        rows.append(
            {
                "phase": one.phase,
                "micro": one.micro,
                "place": one.place,
                "lines": envelope(lines),
                "delta": delta,
                "work": _line(one.work, other.work, few, many),
            }
        )
    return rows


def peak_lines(
    first: list[TracedSegment], second: list[TracedSegment], few: int, many: int
) -> list[tuple[float, float]]:
    """The lines of all live bytes, fixed and for each sample, that are the step's peak at some batch size.

    The timelines are those with `few` and `many` samples. Raises TimelinesDiffer.
    """
    _check(first, second)
    pairs = [pair for one, other in zip(first, second, strict=True) for pair in _pairs(one, other)]
    lines = envelope([_line((sum(a),), (sum(b),), few, many) for a, b in pairs])
    return [(fixed, each) for (fixed,), (each,) in lines]


def _check(first: list[TracedSegment], second: list[TracedSegment]) -> None:
    if [_name(one) for one in first] != [_name(one) for one in second]:
        raise TimelinesDiffer("the step has other operations at another batch size")


def _pairs(one: TracedSegment, other: TracedSegment) -> list[tuple[Bytes, Bytes]]:
    """The points of a segment at both sizes; the highest of each where the operations differ."""
    if len(one.points) == len(other.points):
        return list(zip(one.points, other.points, strict=True))
    return [(max(one.points, key=sum), max(other.points, key=sum))] if one.points and other.points else []


def deeper(first: TracedSegment, second: TracedSegment, more: int) -> tuple[list[int], list[int]]:
    """Live bytes at the start and at the peak with `more` blocks than `first`; `second` has one block more than it.

    Each block that is alike adds the same bytes to an operation on all blocks, and none to one on a single parameter.
    """
    pairs = list(zip(first.points, second.points, strict=False))
    if len(first.points) != len(second.points):
        pairs = [(max(one.points, key=sum), max(other.points, key=sum)) for one, other in [(first, second)]]
    extended = [_extended(few, many, more) for few, many in [(first.start, second.start), *pairs]]
    return extended[0], max(extended, key=sum)


def deeper_work(first: TracedSegment, second: TracedSegment, more: int) -> Work:
    """The work with `more` blocks than `first`; `second` has one block more than it."""
    calls, flops, moved = (a + more * (b - a) for a, b in zip(first.work, second.work, strict=True))
    return calls, flops, moved


def _extended(few: Bytes, many: Bytes, more: int) -> list[int]:
    return [a + more * (b - a) for a, b in zip(few, many, strict=True)]


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


def _line(low: tuple[float, ...], high: tuple[float, ...], few: int, many: int) -> Line:
    each = tuple((b - a) / (many - few) for a, b in zip(low, high, strict=True))
    return tuple(a - few * slope for a, slope in zip(low, each, strict=True)), each


def _above(bytes_: Bytes, start: Bytes) -> Bytes:
    return tuple(a - b for a, b in zip(bytes_, start, strict=True))


def _name(segment: TracedSegment) -> tuple[str, int, str]:
    return segment.phase, segment.micro, segment.place

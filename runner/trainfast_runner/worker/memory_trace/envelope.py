"""From the courses of two batch sizes to lines: what is alive at any batch size, as far as it can be the peak."""

from __future__ import annotations

from typing import Any

from .ledger import Bytes, Stretch

Line = tuple[tuple[float, ...], tuple[float, ...]]
"""Bytes by category: fixed, and for each sample of the batch."""


class CourseDiffers(Exception):
    """The two courses are not the same operations: nothing can be put together from them."""


def affine(first: list[Stretch], second: list[Stretch], few: int, many: int) -> list[dict[str, Any]]:
    """Each stretch's `lines` above its start, those that are the peak at some batch size, and its `delta` to its end.

    `first` is the course with `few` samples, `second` that with `many`. Raises CourseDiffers.
    """
    if [_name(one) for one in first] != [_name(one) for one in second]:
        raise CourseDiffers("the step goes another way with another batch size")
    found = []
    for one, other in zip(first, second, strict=True):
        pairs = list(zip(one.points, other.points, strict=False))
        if len(one.points) != len(other.points):
            pairs = [(max(one.points, key=sum), max(other.points, key=sum))] if one.points and other.points else []
        lines = [_line(_above(a, one.start), _above(b, other.start), few, many) for a, b in pairs]
        delta = _line(_above(one.end, one.start), _above(other.end, other.start), few, many)
        found.append(
            {"phase": one.phase, "micro": one.micro, "place": one.place, "lines": envelope(lines), "delta": delta}
        )
    return found


def deeper(first: Stretch, second: Stretch, more: int) -> tuple[list[int], list[int]]:
    """Live bytes at the start and at the peak with `more` blocks than `first` has, of which `second` has one more.

    Blocks that are alike add the same to what is alive at an operation on all of them at once, and nothing to what one
    parameter's takes.
    """
    pairs = list(zip(first.points, second.points, strict=False))
    if len(first.points) != len(second.points):
        pairs = [(max(one.points, key=sum), max(other.points, key=sum)) for one, other in [(first, second)]]
    found = [_extended(few, many, more) for few, many in [(first.start, second.start), *pairs]]
    return found[0], max(found, key=sum)


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
            hull.pop()  # already below at one sample, and flatter
        while len(hull) > 1 and _meet(hull[-2], line) <= _meet(hull[-2], hull[-1]):
            hull.pop()
        hull.append(line)
    return hull


def _meet(flat: Line, steep: Line) -> float:
    """The batch size at which the steeper line reaches the flatter."""
    return (sum(flat[0]) - sum(steep[0])) / (sum(steep[1]) - sum(flat[1]))


def _at(line: Line, batch: float) -> float:
    return sum(line[0]) + batch * sum(line[1])


def _line(low: Bytes, high: Bytes, few: int, many: int) -> Line:
    each = tuple((b - a) / (many - few) for a, b in zip(low, high, strict=True))
    return tuple(a - few * slope for a, slope in zip(low, each, strict=True)), each


def _above(bytes_: Bytes, start: Bytes) -> Bytes:
    return tuple(a - b for a, b in zip(bytes_, start, strict=True))


def _name(stretch: Stretch) -> tuple[str, int, str]:
    return stretch.phase, stretch.micro, stretch.place

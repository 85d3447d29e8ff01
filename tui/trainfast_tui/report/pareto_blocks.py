"""Memory against throughput of the measured candidates: a picture with the front, and the front as a table."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from trainfast_runner.search.journal.best import Interval
from trainfast_tui.report.document import Block, Heading, Prose, grid
from trainfast_tui.report.scatter_picture import Axis, PointKind, ScatterLine, ScatterPoint, scatter_picture
from trainfast_tui.text.format import count, number, size

BEST = PointKind("best", "square", "success")
BASELINE = PointKind("baseline", "triangle", "secondary")
ON_FRONT = PointKind("on the front", "dot", "primary")
BEHIND = PointKind("behind the front", "ring", "muted")


@dataclass(frozen=True, slots=True)
class MeasuredCandidate:
    """A candidate that was measured: its number, its settings in words, samples/s and highest peak in bytes."""

    number: int
    words: str
    rate: Interval
    peak_bytes: int


def pareto_blocks(
    measured: Sequence[MeasuredCandidate],
    best: int,
    baseline: int | None,
    front: Collection[int],
    limit_bytes: int | None,
) -> list[Block]:
    """Return the picture and the table of the front; a sentence if no candidate has both figures."""
    heading = Heading("Memory against throughput")
    points = [
        ScatterPoint(
            candidate.peak_bytes,
            candidate.rate.median,
            _kind(candidate.number, best, baseline, front),
            _named(candidate),
        )
        for candidate in measured
    ]
    title = "throughput by peak memory of each measured candidate"
    x_axis = Axis("peak memory, a rank", size, binary=True)
    lines = list(_lines(measured, front, limit_bytes))
    pictures = scatter_picture(title, points, lines, x_axis, Axis("samples/s", number))
    if not pictures:
        return [heading, Prose("No candidate has both a measured throughput and a measured peak.")]
    header = ("", "settings", "samples/s", "peak memory")
    rows = [
        (count(candidate.number), candidate.words, number(candidate.rate.median), size(candidate.peak_bytes))
        for candidate in sorted(measured, key=lambda candidate: candidate.peak_bytes)
        if candidate.number in front
    ]
    return [
        heading,
        *pictures,
        Prose("On the front no other candidate is faster with less memory:"),
        grid(header, rows, (0, 2, 3)),
    ]


def _kind(candidate: int, best: int, baseline: int | None, front: Collection[int]) -> PointKind:
    if candidate == best:
        return BEST
    if candidate == baseline:
        return BASELINE
    return ON_FRONT if candidate in front else BEHIND


def _named(candidate: MeasuredCandidate) -> str:
    return f"{candidate.words}: {number(candidate.rate.median)} samples/s with {size(candidate.peak_bytes)}"


def _lines(
    measured: Sequence[MeasuredCandidate], front: Collection[int], limit_bytes: int | None
) -> Iterator[ScatterLine]:
    """Yield the front as steps, and the limit as a line at its bytes."""
    on_front = sorted(
        (candidate.peak_bytes, candidate.rate.median) for candidate in measured if candidate.number in front
    )
    if len(on_front) > 1:
        points = [on_front[0]]
        for peak, rate in on_front[1:]:
            points += [(peak, points[-1][1]), (peak, rate)]
        yield ScatterLine(tuple(points), "front", "primary front")
    if limit_bytes is not None:
        highest = max((candidate.rate.median for candidate in measured), default=0.0)
        yield ScatterLine(((limit_bytes, 0), (limit_bytes, highest)), f"limit {size(limit_bytes)}", "error limit")

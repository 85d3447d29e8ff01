"""Memory against throughput of the measured candidates: a picture with the front, and the front as a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from trainfast_runner.search.best.best_so_far import BestSoFar
from trainfast_runner.search.journal.best import BestAnswer
from trainfast_tui.charts.scatter_chart import drawn_limit
from trainfast_tui.report.blocks import Block, Heading, Prose, filled_grid
from trainfast_tui.report.pictures import (
    BEHIND_FRONT,
    ON_FRONT,
    Axis,
    PicturePoint,
    PointKind,
    ScatterLine,
    scatter_picture,
)
from trainfast_tui.text.format import count, number, size
from trainfast_tui.text.search.best_figures import typed_knobs
from trainfast_tui.text.tables import FigureHeading, figure_headings

BEST = PointKind("best", "s", "success")
BASELINE = PointKind("baseline", "^", "secondary")


def search_pareto_blocks(so_far: BestSoFar, answer: BestAnswer) -> list[Block]:
    """Return the picture and the table of the front; a sentence if no candidate has both figures."""
    heading = Heading("Memory against throughput")
    measured = _measured(so_far, answer)
    points = [
        PicturePoint(
            peak,
            rate,
            _kind(candidate, so_far, answer),
            f"{_knobs(so_far, candidate)}: {number(rate)} samples/s with {size(peak)}",
        )
        for candidate, (peak, rate) in measured.items()
    ]
    front = sorted((*measured[candidate], candidate) for candidate in answer.pareto_numbers if candidate in measured)
    limit_bytes = so_far.limit_bytes
    shown_limit = drawn_limit(limit_bytes, max((peak for peak, _ in measured.values()), default=0))
    lines = list(_front_line([(peak, rate) for peak, rate, _ in front]))
    if shown_limit is not None:
        lines.append(_limit_line(shown_limit, measured))
    title = "throughput by peak memory of each measured setting"
    x_axis, y_axis = Axis("peak memory, a rank", size, binary=True), Axis("samples/s", number)
    picture = scatter_picture(title, points, lines, x_axis, y_axis)
    if picture is None:
        return [heading, Prose("No setting has both a measured throughput and a measured peak.")]
    rows = [(count(candidate), _knobs(so_far, candidate), number(rate), size(peak)) for peak, rate, candidate in front]
    return [
        heading,
        picture,
        *(
            [Prose(f"The limit, {size(limit_bytes)}, is far right of the picture.")]
            if limit_bytes != shown_limit
            else []
        ),
        Prose("On the front no other setting is faster with less memory:"),
        filled_grid((FigureHeading(""), "settings", *figure_headings("samples/s", "peak memory")), rows),
    ]


def _measured(so_far: BestSoFar, answer: BestAnswer) -> dict[int, tuple[int, float]]:
    """Return the highest peak in bytes and the samples/s of each candidate that has both, by its number."""
    return {
        verdict.candidate_number: (peak, verdict.rate.median)
        for verdict in answer.verdicts
        if verdict.rate is not None and (peak := so_far.peak_bytes(verdict.candidate_number)) is not None
    }


def _kind(candidate: int, so_far: BestSoFar, answer: BestAnswer) -> PointKind:
    if candidate == answer.best_number:
        return BEST
    if so_far.space is not None and candidate == so_far.space.baseline_number:
        return BASELINE
    return ON_FRONT if candidate in answer.pareto_numbers else BEHIND_FRONT


def _knobs(so_far: BestSoFar, candidate: int) -> str:
    return typed_knobs(so_far.candidate(candidate).knobs)


def _front_line(front: list[tuple[int, float]]) -> Iterator[ScatterLine]:
    """Yield the front, by rising peak, as steps; a single candidate has no line."""
    if len(front) > 1:
        points: list[tuple[float, float]] = [front[0]]
        for peak, rate in front[1:]:
            points += [(peak, points[-1][1]), (peak, rate)]
        yield ScatterLine(tuple(points), "front", "primary", ":")


def _limit_line(limit_bytes: int, measured: Mapping[int, tuple[int, float]]) -> ScatterLine:
    highest = max((rate for _, rate in measured.values()), default=0.0)
    return ScatterLine(((limit_bytes, 0), (limit_bytes, highest)), f"limit {size(limit_bytes)}", "error", "--")

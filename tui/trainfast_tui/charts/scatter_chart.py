"""Throughput over memory: one sign a candidate, those that none beats in both as a line, and the limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainfast_runner.results.pareto import pareto_front
from trainfast_tui.charts.braille import X_BITS, draw
from trainfast_tui.charts.framed_plot import FRAME_COLUMNS, FRAME_ROWS, FramedPlot, cell_at
from trainfast_tui.charts.time_columns import ColumnRanges
from trainfast_tui.charts.y_range import LIMIT_HEADROOM, YRange, nice_ceiling
from trainfast_tui.text import format as fmt
from trainfast_tui.text.lines import Line, Piece, Tone

GUTTER = 8
"""Cells left of the axis, for a rate."""
MAX_LIMIT_RATIO = 4.0
"""Chosen, not measured: a limit over this many times the largest candidate is written at the edge, not drawn."""


@dataclass(frozen=True, slots=True)
class CandidatePoint:
    """A candidate and its rate in the objective's unit; None stands at the bottom: out of memory, or not measured."""

    memory_bytes: int
    rate: float | None
    sign: str
    tone: Tone


def front_of(points: Sequence[CandidatePoint]) -> list[CandidatePoint]:
    """Return the measured points that no other beats in both rate and memory, the smallest first."""
    measured = [(point, point.rate) for point in points if point.rate is not None]
    front = pareto_front([(point.memory_bytes, rate) for point, rate in measured])
    return [measured[index][0] for index in reversed(front)]


def drawn_limit(limit_bytes: int | None, largest_bytes: int) -> int | None:
    """Return the limit if a picture of candidates up to `largest_bytes` can show it; None without one or a far one."""
    is_near = limit_bytes is not None and limit_bytes <= MAX_LIMIT_RATIO * largest_bytes
    return limit_bytes if is_near else None


def scatter_chart(points: Sequence[CandidatePoint], limit_bytes: int | None, width: int, height: int) -> list[Line]:
    """Return `height` lines of `width` cells: y the rates, x bytes from zero; empty without room or a rate.

    Later points cover earlier ones; the front is a line of dots from each candidate to the next larger and faster one.
    """
    plot_width, plot_height = width - GUTTER - FRAME_COLUMNS, height - FRAME_ROWS
    rates = [point.rate for point in points if point.rate is not None]
    if plot_width < 16 or plot_height < 3 or not rates:
        return []
    low, high = YRange().fit(min(rates), max(rates), 0, y_min=None)
    largest_bytes = max(point.memory_bytes for point in points)
    limit_drawn = drawn_limit(limit_bytes, largest_bytes)
    right_bytes = nice_ceiling(float(largest_bytes), binary=True)
    if limit_drawn is not None:
        right_bytes = max(limit_drawn, largest_bytes) * LIMIT_HEADROOM
    dots = _front_dots(front_of(points), right_bytes, (low, high), plot_width, plot_height)
    plot = FramedPlot(dots, plot_width)
    limit_column = None
    if limit_drawn is not None:
        limit_column = cell_at(limit_drawn / right_bytes, plot_width)
        for row in range(plot_height):
            plot.put(row, limit_column, "┊", "error")
    for point in points:
        share = 0.0 if point.rate is None else (point.rate - low) / (high - low)
        row = plot_height - 1 - cell_at(share, plot_height)
        plot.put(row, cell_at(point.memory_bytes / right_bytes, plot_width), point.sign, point.tone)
    labels: dict[int, Piece] = {0: (fmt.number(high), "muted"), plot_height - 1: (fmt.number(low), "muted")}
    return plot.lines(GUTTER, labels, _memory_labels(right_bytes, limit_bytes, limit_column, plot_width))


def _front_dots(
    front: Sequence[CandidatePoint], right_bytes: float, y_range: tuple[float, float], width: int, height: int
) -> bytearray:
    """Draw the front as steps: up at each of its candidates, level until the next one."""
    cells = bytearray(width * height)
    count = width << X_BITS
    columns: ColumnRanges = [None] * count
    for point, following in zip(front, [*front[1:], None], strict=True):
        assert point.rate is not None
        begin = cell_at(point.memory_bytes / right_bytes, count)
        end = count if following is None else cell_at(following.memory_bytes / right_bytes, count)
        columns[begin:end] = [(point.rate, point.rate)] * (end - begin)
    draw(cells, width, height, columns, y_range)
    return cells


def _memory_labels(right_bytes: float, limit_bytes: int | None, limit_column: int | None, width: int) -> Line:
    """Return the labels below the axis: zero, the limit below its line, and the end or the limit beyond it."""
    zero: Line = [(" " * (GUTTER + FRAME_COLUMNS) + "0", "muted")]
    if limit_bytes is None:
        return [*zero, (fmt.to_width(f"peak memory {fmt.size(right_bytes)}", width - 1, "right"), "muted")]
    words = f"limit {fmt.size(limit_bytes)}"
    if limit_column is None:
        words = f"peak memory {fmt.size(right_bytes)}, the {words} is far right"
        return [*zero, (fmt.to_width(words, width - 1, "right"), "muted")]
    begin = max(12, min(limit_column - len(words) // 2, width - len(words)))
    return [*zero, (fmt.to_width(" peak memory", begin - 1), "muted"), (words, "error")]

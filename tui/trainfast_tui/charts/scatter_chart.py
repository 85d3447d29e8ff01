"""The charts of the searches: throughput over memory, and memory over batch size, each with its limit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from trainfast_runner.results.distributions import pareto_front
from trainfast_tui.charts.chart_data import GLYPHS, LIMIT_HEADROOM, X_BITS, ColumnRanges, YRange, draw, nice_ceiling
from trainfast_tui.text import format as fmt
from trainfast_tui.text.format import Line, Piece, Tone, join_pieces

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


FIT_GUTTER = 10
"""Cells left of the axis, for a size with its unit."""


@dataclass(frozen=True, slots=True)
class PeakPoint:
    """A measured peak, drawn as one sign over line and limit."""

    batch_size: int
    peak_bytes: int
    sign: str
    tone: Tone


def fit_chart(
    points: Sequence[PeakPoint],
    fitted_bytes: Callable[[float], float] | None,
    limit_bytes: int | None,
    largest_batch: int,
    width: int,
    height: int,
) -> list[Line]:
    """Return `height` lines of `width` cells: y in bytes from zero, x the batch size from zero to `largest_batch`.

    `fitted_bytes` gives the fitted peak in bytes of a batch size.
    """
    plot_width, plot_height = width - FIT_GUTTER - FRAME_COLUMNS, height - FRAME_ROWS
    if plot_width < 8 or plot_height < 2:
        return []
    top_bytes = _top_bytes(points, limit_bytes)
    right_batch = max(1, largest_batch)
    plot = FramedPlot(_fit_dots(fitted_bytes, right_batch, top_bytes, plot_width, plot_height), plot_width)

    def row_of(size_bytes: float) -> int:
        return plot_height - 1 - cell_at(size_bytes / top_bytes, plot_height)

    labels: dict[int, Piece] = {0: (fmt.size(top_bytes), "muted"), plot_height - 1: ("0", "muted")}
    if limit_bytes is not None:
        plot.put_in_free_cells(row_of(limit_bytes), "╌", "error")
        labels[row_of(limit_bytes)] = fmt.size(limit_bytes), "error"
    for point in points:
        column = cell_at(point.batch_size / right_batch, plot_width)
        plot.put(row_of(point.peak_bytes), column, point.sign, point.tone)
    right = fmt.to_width(f"batch_size {right_batch:,}", plot_width - 1, "right")
    return plot.lines(FIT_GUTTER, labels, [(" " * (FIT_GUTTER + FRAME_COLUMNS) + "0" + right, "muted")])


def _top_bytes(points: Sequence[PeakPoint], limit_bytes: int | None) -> float:
    """Return the bytes at the upper end of the y axis."""
    largest_bytes = max([limit_bytes or 0, *(point.peak_bytes for point in points), 1])
    return (
        float(largest_bytes * LIMIT_HEADROOM)
        if limit_bytes is not None
        else nice_ceiling(float(largest_bytes), binary=True)
    )


def _fit_dots(
    fitted_bytes: Callable[[float], float] | None, right_batch: int, top_bytes: float, width: int, height: int
) -> bytearray:
    """Draw the fit in dots, up to the top of the chart."""
    cells = bytearray(width * height)
    if fitted_bytes is not None:
        count = width << X_BITS
        peaks = [fitted_bytes(column / max(1, count - 1) * right_batch) for column in range(count)]
        columns: ColumnRanges = [(peak, peak) if 0 <= peak <= top_bytes else None for peak in peaks]
        draw(cells, width, height, columns, (0.0, top_bytes))
    return cells


FRAME_COLUMNS, FRAME_ROWS = 2, 2
"""Cells of the frame beside the y labels, and lines of the frame with the x labels."""


class FramedPlot:
    """Signs of one cell each, put over the dots of a curve."""

    def __init__(self, dots: bytearray, width: int) -> None:
        """`dots` is drawn by `chart_data.draw`, in rows of `width` cells."""
        glyphs = [GLYPHS[mask] for mask in dots]
        self._signs = [glyphs[start : start + width] for start in range(0, len(glyphs), width)]
        self._tones: list[list[Tone]] = [["primary" if sign != " " else "text" for sign in row] for row in self._signs]
        self._width = width

    def put(self, row: int, column: int, sign: str, tone: Tone) -> None:
        """Put a sign into a cell, over any other."""
        self._signs[row][column], self._tones[row][column] = sign, tone

    def put_in_free_cells(self, row: int, sign: str, tone: Tone) -> None:
        """Put a sign into each empty cell of a row."""
        for column in range(self._width):
            if self._signs[row][column] == " ":
                self.put(row, column, sign, tone)

    def lines(self, gutter: int, y_labels: Mapping[int, Piece], x_labels: Line) -> list[Line]:
        """Return the plot in its frame, with the y labels by row in `gutter` cells and `x_labels` as the last line."""
        lines: list[Line] = []
        for row, (signs, tones) in enumerate(zip(self._signs, self._tones, strict=True)):
            text, tone = y_labels.get(row, ("", "muted"))
            label = fmt.to_width(text, gutter, "right")
            lines.append([(label, tone), (" │", "muted"), *join_pieces(zip(signs, tones, strict=True))])
        lines.append([(" " * gutter + " └", "muted"), ("─" * self._width, "muted")])
        return [*lines, x_labels]


def cell_at(share: float, cells: int) -> int:
    """Return the cell at this share of an axis of `cells` cells, clamped to its ends."""
    return min(cells - 1, max(0, int(share * (cells - 1) + 0.5)))

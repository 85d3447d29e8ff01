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
class ChartPoint:
    """One sign in a chart, over its lines."""

    x: int
    """Peak memory in bytes of a candidate, or a batch size."""
    y: float | None
    """A candidate's rate in the objective's unit, or a peak in bytes; None stands at the bottom: not measured."""
    sign: str
    tone: Tone


def front_of(points: Sequence[ChartPoint]) -> list[ChartPoint]:
    """Return the measured points that no other beats in both rate and memory, the smallest first."""
    measured = [(point, point.y) for point in points if point.y is not None]
    front = pareto_front([(point.x, rate) for point, rate in measured])
    return [measured[index][0] for index in reversed(front)]


def drawn_limit(limit_bytes: int | None, largest_bytes: int) -> int | None:
    """Return the limit if a picture of candidates up to `largest_bytes` can show it; None without one or a far one."""
    is_near = limit_bytes is not None and limit_bytes <= MAX_LIMIT_RATIO * largest_bytes
    return limit_bytes if is_near else None


def scatter_chart(points: Sequence[ChartPoint], limit_bytes: int | None, width: int, height: int) -> list[Line]:
    """Return `height` lines of `width` cells: y the rates, x bytes from zero; empty without room or a rate.

    Later points cover earlier ones; the front is a line of dots from each candidate to the next larger and faster one.
    """
    rates = [point.y for point in points if point.y is not None]
    if width - GUTTER - FRAME_COLUMNS < 16 or height - FRAME_ROWS < 3 or not rates:
        return []
    low, high = YRange().fit(min(rates), max(rates), 0, y_min=None)
    largest_bytes = max(point.x for point in points)
    limit_drawn = drawn_limit(limit_bytes, largest_bytes)
    right_bytes = nice_ceiling(float(largest_bytes), binary=True)
    if limit_drawn is not None:
        right_bytes = max(limit_drawn, largest_bytes) * LIMIT_HEADROOM
    plot = FramedPlot(width - GUTTER - FRAME_COLUMNS, height - FRAME_ROWS, right_bytes, (low, high))
    # The front is drawn as steps: up at each of its candidates, level until the next one.
    dots: ColumnRanges = [None] * plot.dot_count
    for point in front_of(points):
        begin, rate = cell_at(point.x / right_bytes, plot.dot_count), point.y or 0.0
        dots[begin:] = [(rate, rate)] * (plot.dot_count - begin)
    plot.draw_curve(dots)
    limit_column = None
    if limit_drawn is not None:
        limit_column = plot.column_of(limit_drawn)
        for row in range(plot.height):
            plot.put(row, limit_column, "┊", "error")
    for point in points:
        plot.put_point(point)
    labels: dict[int, Piece] = {0: (fmt.number(high), "muted"), plot.height - 1: (fmt.number(low), "muted")}
    return plot.lines(GUTTER, labels, _memory_labels(right_bytes, limit_bytes, limit_column, plot.width))


def _memory_labels(right_bytes: float, limit_bytes: int | None, limit_column: int | None, width: int) -> Line:
    """Return the labels below the axis after its zero: the limit below its line, and the end or the limit beyond it."""
    end = f"peak memory {fmt.size(right_bytes)}"
    limit = "" if limit_bytes is None else f"limit {fmt.size(limit_bytes)}"
    if limit_column is None:
        words = f"{end}, the {limit} is far right" if limit else end
        return [(fmt.to_width(words, width - 1, "right"), "muted")]
    begin = max(12, min(limit_column - len(limit) // 2, width - len(limit)))
    return [(fmt.to_width(" peak memory", begin - 1), "muted"), (limit, "error")]


FIT_GUTTER = 10
"""Cells left of the axis, for a size with its unit."""


def fit_chart(
    points: Sequence[ChartPoint],
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
    largest_bytes = float(max([limit_bytes or 0, *(point.y or 0 for point in points), 1]))
    top_bytes = nice_ceiling(largest_bytes, binary=True) if limit_bytes is None else largest_bytes * LIMIT_HEADROOM
    right_batch = max(1, largest_batch)
    plot = FramedPlot(plot_width, plot_height, right_batch, (0.0, top_bytes))
    if fitted_bytes is not None:
        last = max(1, plot.dot_count - 1)
        peaks = [fitted_bytes(dot / last * right_batch) for dot in range(plot.dot_count)]
        plot.draw_curve([(peak, peak) if 0 <= peak <= top_bytes else None for peak in peaks])
    labels: dict[int, Piece] = {0: (fmt.size(top_bytes), "muted"), plot_height - 1: ("0", "muted")}
    if limit_bytes is not None:
        plot.put_in_free_cells(plot.row_of(limit_bytes), "╌", "error")
        labels[plot.row_of(limit_bytes)] = fmt.size(limit_bytes), "error"
    for point in points:
        plot.put_point(point)
    return plot.lines(
        FIT_GUTTER, labels, [(fmt.to_width(f"batch_size {right_batch:,}", plot_width - 1, "right"), "muted")]
    )


FRAME_COLUMNS, FRAME_ROWS = 2, 2
"""Cells of the frame beside the y labels, and lines of the frame with the x labels."""


class FramedPlot:
    """Signs of one cell each, put over the dots of a curve; x from zero to `right`, y within `y_range`."""

    def __init__(self, width: int, height: int, right: float, y_range: tuple[float, float]) -> None:
        self.width, self.height = width, height
        self.dot_count = width << X_BITS
        """Dot columns of the curve."""
        self._right, self._y_range = right, y_range
        self._signs = [[" "] * width for _ in range(height)]
        self._tones: list[list[Tone]] = [["text"] * width for _ in range(height)]

    def draw_curve(self, columns: ColumnRanges) -> None:
        """Draw the curve in dots, in the tone `primary`."""
        cells = bytearray(self.width * self.height)
        draw(cells, self.width, self.height, columns, self._y_range)
        for place, mask in enumerate(cells):
            if mask:
                self.put(*divmod(place, self.width), GLYPHS[mask], "primary")

    def column_of(self, x: float) -> int:
        """Return the column of a value of the x axis."""
        return cell_at(x / self._right, self.width)

    def row_of(self, y: float) -> int:
        """Return the row of a value of the y axis."""
        low, high = self._y_range
        return self.height - 1 - cell_at((y - low) / (high - low), self.height)

    def put_point(self, point: ChartPoint) -> None:
        """Put the sign of a point at its place, over any other."""
        row = self.height - 1 if point.y is None else self.row_of(point.y)
        self.put(row, self.column_of(point.x), point.sign, point.tone)

    def put(self, row: int, column: int, sign: str, tone: Tone) -> None:
        """Put a sign into a cell, over any other."""
        self._signs[row][column], self._tones[row][column] = sign, tone

    def put_in_free_cells(self, row: int, sign: str, tone: Tone) -> None:
        """Put a sign into each empty cell of a row."""
        for column in range(self.width):
            if self._signs[row][column] == " ":
                self.put(row, column, sign, tone)

    def lines(self, gutter: int, y_labels: Mapping[int, Piece], x_labels: Line) -> list[Line]:
        """Return the plot in its frame, with the y labels by row in `gutter` cells, and below zero and `x_labels`."""
        lines: list[Line] = []
        for row, (signs, tones) in enumerate(zip(self._signs, self._tones, strict=True)):
            text, tone = y_labels.get(row, ("", "muted"))
            label = fmt.to_width(text, gutter, "right")
            lines.append([(label, tone), (" │", "muted"), *join_pieces(zip(signs, tones, strict=True))])
        lines.append([(" " * gutter + " └", "muted"), ("─" * self.width, "muted")])
        return [*lines, [(" " * (gutter + FRAME_COLUMNS) + "0", "muted"), *x_labels]]


def cell_at(share: float, cells: int) -> int:
    """Return the cell at this share of an axis of `cells` cells, clamped to its ends."""
    return min(cells - 1, max(0, int(share * (cells - 1) + 0.5)))

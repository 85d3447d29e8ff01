"""The charts of the searches: throughput over memory, and memory over batch size, each with its limit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from trainfast_runner.results.distributions import pareto_front
from trainfast_tui.charts.chart_data import GLYPHS, LIMIT_HEADROOM, X_BITS, ColumnRanges, YRange, draw, nice_ceiling
from trainfast_tui.text import format as fmt
from trainfast_tui.text.format import Line, Piece, Tone, join_pieces

GUTTER = 10
"""Cells left of the axis, for a rate or a size with its unit."""
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


def scatter_chart(points: Sequence[ChartPoint], limit_bytes: int | None, width: int, height: int) -> list[Line]:
    """Return `height` lines of `width` cells: y the rates, x bytes from zero; empty without room or a rate.

    Later points cover earlier ones; the front is a line of dots from each candidate to the next larger and faster one.
    """
    columns, rows = width - GUTTER - FRAME_COLUMNS, height - FRAME_ROWS
    rates = [point.y for point in points if point.y is not None]
    if columns < 16 or rows < 3 or not rates:
        return []
    low, high = YRange().fit(min(rates), max(rates), 0, y_min=None)
    largest_bytes = max(point.x for point in points)
    is_drawn = limit_bytes is not None and limit_bytes <= MAX_LIMIT_RATIO * largest_bytes
    right_bytes = nice_ceiling(float(largest_bytes), binary=True)
    if is_drawn and limit_bytes is not None:
        right_bytes = max(limit_bytes, largest_bytes) * LIMIT_HEADROOM
    # The front is drawn as steps: up at each of its candidates, level until the next one.
    dot_count = columns << X_BITS
    dots: ColumnRanges = [None] * dot_count
    for point in front_of(points):
        begin, rate = cell_at(point.x / right_bytes, dot_count), point.y or 0.0
        dots[begin:] = [(rate, rate)] * (dot_count - begin)
    grid = _grid(columns, rows)
    limit = "" if limit_bytes is None else f", {'' if is_drawn else 'the '}limit {fmt.size(limit_bytes)}"
    if is_drawn and limit_bytes is not None:
        for row in grid:
            row[cell_at(limit_bytes / right_bytes, columns)] = "┊", "error"
    _put_curve(grid, dots, (low, high))
    _put_points(grid, points, right_bytes, (low, high))
    labels: dict[int, Piece] = {0: (fmt.number(high), "muted"), rows - 1: (fmt.number(low), "muted")}
    words = f"peak memory {fmt.size(right_bytes)}{limit}{'' if is_drawn or not limit else ' is far right'}"
    return _framed(grid, labels, words)


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
    columns, rows = width - GUTTER - FRAME_COLUMNS, height - FRAME_ROWS
    if columns < 8 or rows < 2:
        return []
    largest_bytes = float(max([limit_bytes or 0, *(point.y or 0 for point in points), 1]))
    top_bytes = nice_ceiling(largest_bytes, binary=True) if limit_bytes is None else largest_bytes * LIMIT_HEADROOM
    right_batch = max(1, largest_batch)
    grid = _grid(columns, rows)
    labels: dict[int, Piece] = {0: (fmt.size(top_bytes), "muted"), rows - 1: ("0", "muted")}
    if limit_bytes is not None:
        row = _row_of(limit_bytes, (0.0, top_bytes), rows)
        grid[row] = [("╌", "error")] * columns
        labels[row] = fmt.size(limit_bytes), "error"
    if fitted_bytes is not None:
        last = (columns << X_BITS) - 1
        peaks = [fitted_bytes(dot / last * right_batch) for dot in range(last + 1)]
        _put_curve(grid, [(peak, peak) if 0 <= peak <= top_bytes else None for peak in peaks], (0.0, top_bytes))
    _put_points(grid, points, right_batch, (0.0, top_bytes))
    return _framed(grid, labels, f"batch_size {right_batch:,}")


FRAME_COLUMNS, FRAME_ROWS = 2, 2
"""Cells of the frame beside the y labels, and lines of the frame with the x labels."""
Grid = list[list[Piece]]
"""The cells of a chart by row, each with its tone."""


def _grid(columns: int, rows: int) -> Grid:
    return [[(" ", "text")] * columns for _ in range(rows)]


def _put_curve(grid: Grid, dots: ColumnRanges, y_range: tuple[float, float]) -> None:
    """Draw the curve, one range a column of dots, in the tone `primary`."""
    columns = len(grid[0])
    cells = bytearray(columns * len(grid))
    draw(cells, columns, len(grid), dots, y_range)
    for place, mask in enumerate(cells):
        if mask:
            grid[place // columns][place % columns] = GLYPHS[mask], "primary"


def _put_points(grid: Grid, points: Sequence[ChartPoint], right: float, y_range: tuple[float, float]) -> None:
    """Put the signs of the points over all else; the x axis ends at `right`."""
    for point in points:
        row = len(grid) - 1 if point.y is None else _row_of(point.y, y_range, len(grid))
        grid[row][cell_at(point.x / right, len(grid[0]))] = point.sign, point.tone


def _row_of(y: float, y_range: tuple[float, float], rows: int) -> int:
    low, high = y_range
    return rows - 1 - cell_at((y - low) / (high - low), rows)


def _framed(grid: Grid, y_labels: Mapping[int, Piece], x_words: str) -> list[Line]:
    """Return the grid in its frame, with the y labels by row in `GUTTER` cells, and below zero and `x_words`."""
    lines: list[Line] = []
    for row, cells in enumerate(grid):
        text, tone = y_labels.get(row, ("", "muted"))
        lines.append([(fmt.to_width(text, GUTTER, "right"), tone), (" │", "muted"), *join_pieces(cells)])
    columns = len(grid[0])
    lines.append([(f"{' ' * GUTTER} └{'─' * columns}", "muted")])
    return [*lines, [(f"{' ' * (GUTTER + FRAME_COLUMNS)}0{fmt.to_width(x_words, columns - 1, 'right')}", "muted")]]


def cell_at(share: float, cells: int) -> int:
    """Return the cell at this share of an axis of `cells` cells, clamped to its ends."""
    return min(cells - 1, max(0, int(share * (cells - 1) + 0.5)))

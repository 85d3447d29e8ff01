"""Peak memory over batch size: the measured peaks, the fit through them, and the limit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trainfast_tui.charts.braille import X_BITS, draw
from trainfast_tui.charts.framed_plot import FRAME_COLUMNS, FRAME_ROWS, FramedPlot, cell_at
from trainfast_tui.charts.time_columns import ColumnRanges
from trainfast_tui.charts.y_range import LIMIT_HEADROOM, nice_ceiling
from trainfast_tui.text import format as fmt
from trainfast_tui.text.lines import Line, Piece, Tone

GUTTER = 10
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
    plot_width, plot_height = width - GUTTER - FRAME_COLUMNS, height - FRAME_ROWS
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
    return plot.lines(GUTTER, labels, [(" " * (GUTTER + FRAME_COLUMNS) + "0" + right, "muted")])


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

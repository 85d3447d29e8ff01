"""Peak memory over batch size: the measured peaks, the fit through them, and the limit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trainfast_tui.charts.braille import GLYPHS, LIMIT_HEADROOM, X_BITS, draw, nice_ceiling
from trainfast_tui.text import format as fmt
from trainfast_tui.text.lines import Line, Tone, joined

GUTTER = 10
"""Cells left of the axis, for a size with its unit."""


@dataclass(frozen=True, slots=True)
class Point:
    """A measured peak, drawn as one sign over line and limit."""

    batch_size: int
    peak_bytes: int
    sign: str
    tone: Tone


def fit_chart(
    points: Sequence[Point],
    line: Callable[[float], float] | None,
    limit_bytes: int | None,
    largest_batch: int,
    width: int,
    height: int,
) -> list[Line]:
    """Return `height` lines of `width` cells: y in bytes from zero, x the batch size from zero to `largest_batch`.

    `line` gives the fitted peak in bytes of a batch size.
    """
    plot_width, plot_height = width - GUTTER - 2, height - 2
    if plot_width < 8 or plot_height < 2:
        return []
    top = _top(points, limit_bytes)
    across = max(1, largest_batch)
    signs, tones = _drawn_line(line, across, top, plot_width, plot_height)
    limit_row = None if limit_bytes is None else _row(limit_bytes, top, plot_height)
    if limit_row is not None:
        for column in range(plot_width):
            if signs[limit_row][column] == " ":
                signs[limit_row][column], tones[limit_row][column] = "╌", "error"
    for point in points:
        column = min(plot_width - 1, int(point.batch_size / across * (plot_width - 1) + 0.5))
        row = _row(point.peak_bytes, top, plot_height)
        signs[row][column], tones[row][column] = point.sign, point.tone
    labels = {0: fmt.size(top), plot_height - 1: "0"}
    if limit_row is not None:
        labels[limit_row] = fmt.size(limit_bytes)
    lines: list[Line] = []
    for row in range(plot_height):
        tone: Tone = "error" if row == limit_row else "muted"
        label = fmt.to_width(labels.get(row, ""), GUTTER, "right")
        lines.append([(label, tone), (" │", "muted"), *joined(zip(signs[row], tones[row], strict=True))])
    lines.append([(" " * GUTTER + " └", "muted"), ("─" * plot_width, "muted")])
    right = f"batch_size {across:,}"
    lines.append([(" " * (GUTTER + 2) + "0" + fmt.to_width(right, plot_width - 1, "right"), "muted")])
    return lines


def _top(points: Sequence[Point], limit_bytes: int | None) -> float:
    most = max([limit_bytes or 0, *(point.peak_bytes for point in points), 1])
    return float(most * LIMIT_HEADROOM) if limit_bytes is not None else nice_ceiling(float(most), binary=True)


def _row(size_bytes: float, top: float, height: int) -> int:
    return height - 1 - min(height - 1, max(0, int(size_bytes / top * (height - 1) + 0.5)))


def _drawn_line(
    line: Callable[[float], float] | None, across: int, top: float, width: int, height: int
) -> tuple[list[list[str]], list[list[Tone]]]:
    """Draw the fit in dots, up to the top of the chart."""
    cells = bytearray(width * height)
    if line is not None:
        count = width << X_BITS
        peaks = [line(column / max(1, count - 1) * across) for column in range(count)]
        draw(cells, width, height, [(peak, peak) if 0 <= peak <= top else None for peak in peaks], (0.0, top))
    signs = [[GLYPHS[cells[row * width + column]] for column in range(width)] for row in range(height)]
    tones: list[list[Tone]] = [["primary" if sign != " " else "text" for sign in row] for row in signs]
    return signs, tones

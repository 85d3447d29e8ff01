"""Throughput over memory: one sign a setting, the settings that none beats in both as a line, and the limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainfast_tui.charts.braille import GLYPHS, LIMIT_HEADROOM, X_BITS, ColumnRanges, YRange, draw, nice_ceiling
from trainfast_tui.text import format as fmt
from trainfast_tui.text.lines import Line, Tone, joined

GUTTER = 8
"""Cells left of the axis, for a rate."""
FAR = 4.0
"""A limit beyond so many times the largest setting is written at the edge, not drawn."""


@dataclass(frozen=True, slots=True)
class Spot:
    """A setting. A `rate` of None stands at the bottom: out of memory, or not measured yet."""

    memory_bytes: int
    rate: float | None
    sign: str
    tone: Tone


def pareto(spots: Sequence[Spot]) -> list[Spot]:
    """Return the measured spots that no other beats in both rate and memory, the smallest first."""
    front: list[Spot] = []
    for spot in sorted(spots, key=lambda spot: (-(spot.rate or 0.0), spot.memory_bytes)):
        if spot.rate is not None and (not front or spot.memory_bytes < front[-1].memory_bytes):
            front.append(spot)
    return front[::-1]


def scatter(spots: Sequence[Spot], limit_bytes: int | None, width: int, height: int) -> list[Line]:
    """Return `height` lines of `width` cells: y in samples/s, x in bytes from zero; empty without room or a rate.

    Later spots cover earlier ones; the front is a line of dots from each setting to the next larger and faster one.
    """
    plot_width, plot_height = width - GUTTER - 2, height - 2
    rates = [spot.rate for spot in spots if spot.rate is not None]
    if plot_width < 16 or plot_height < 3 or not rates:
        return []
    low, high = YRange().fit(min(rates), max(rates), 0, y_min=None)
    most = max(spot.memory_bytes for spot in spots)
    is_far = limit_bytes is not None and limit_bytes > FAR * most
    across = nice_ceiling(float(most), binary=True)
    if limit_bytes is not None and not is_far:
        across = max(limit_bytes, most) * LIMIT_HEADROOM
    cells = _drawn_front(pareto(spots), across, (low, high), plot_width, plot_height)
    signs = [[GLYPHS[cells[row * plot_width + column]] for column in range(plot_width)] for row in range(plot_height)]
    tones: list[list[Tone]] = [["primary" if sign != " " else "text" for sign in row] for row in signs]
    limit_column = None
    if limit_bytes is not None and not is_far:
        limit_column = _column(limit_bytes, across, plot_width)
        for row in range(plot_height):
            signs[row][limit_column], tones[row][limit_column] = "┊", "error"
    for spot in spots:
        share = 0.0 if spot.rate is None else (spot.rate - low) / (high - low)
        row = plot_height - 1 - int(share * (plot_height - 1) + 0.5)
        column = _column(spot.memory_bytes, across, plot_width)
        signs[row][column], tones[row][column] = spot.sign, spot.tone
    labels = {0: fmt.number(high), plot_height - 1: fmt.number(low)}
    lines: list[Line] = []
    for row in range(plot_height):
        label = fmt.to_width(labels.get(row, ""), GUTTER, "right")
        lines.append([(label, "muted"), (" │", "muted"), *joined(zip(signs[row], tones[row], strict=True))])
    lines.append([(" " * GUTTER + " └", "muted"), ("─" * plot_width, "muted")])
    lines.append(_memory_axis(across, limit_bytes, limit_column, plot_width))
    return lines


def _column(size_bytes: float, across: float, width: int) -> int:
    return min(width - 1, max(0, int(size_bytes / across * (width - 1) + 0.5)))


def _drawn_front(
    front: Sequence[Spot], across: float, y_range: tuple[float, float], width: int, height: int
) -> bytearray:
    """Draw the front as steps: up at each of its settings, level until the next one."""
    cells = bytearray(width * height)
    count = width << X_BITS
    columns: ColumnRanges = [None] * count
    for spot, following in zip(front, [*front[1:], None], strict=True):
        assert spot.rate is not None
        begin = _column(spot.memory_bytes, across, count)
        end = count if following is None else _column(following.memory_bytes, across, count)
        columns[begin:end] = [(spot.rate, spot.rate)] * (end - begin)
    draw(cells, width, height, columns, y_range)
    return cells


def _memory_axis(across: float, limit_bytes: int | None, limit_column: int | None, width: int) -> Line:
    """Return the labels below the axis: zero, the limit below its line, and the end or the limit beyond it."""
    zero: Line = [(" " * (GUTTER + 2) + "0", "muted")]
    if limit_bytes is None:
        return [*zero, (fmt.to_width(f"peak memory {fmt.size(across)}", width - 1, "right"), "muted")]
    words = f"limit {fmt.size(limit_bytes)}"
    if limit_column is None:
        words = f"peak memory {fmt.size(across)}, the {words} is far right"
        return [*zero, (fmt.to_width(words, width - 1, "right"), "muted")]
    at = max(12, min(limit_column - len(words) // 2, width - len(words)))
    return [*zero, (fmt.to_width(" peak memory", at - 1), "muted"), (words, "error")]

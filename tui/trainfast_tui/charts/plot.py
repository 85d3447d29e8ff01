"""Draw the plot of a chart as rows of segments: series, limit, throttled time, the cursor and the y axis."""

from collections.abc import Iterable, Sequence
from itertools import pairwise

import msgspec
from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style

from trainfast_tui.charts.braille import GLYPHS, Y_BITS, draw
from trainfast_tui.charts.chart_data import ChartData, Limit
from trainfast_tui.charts.chart_styles import ChartStyles
from trainfast_tui.charts.time_axis import CellAxis
from trainfast_tui.charts.time_columns import ColumnRanges
from trainfast_tui.text.format import plain, to_width
from trainfast_tui.text.shades import Shade

BLANK_STYLE, LIMIT_STYLE, MARK_STYLE, FIRST_SERIES_STYLE = range(4)
"""Indexes into the styles of a row; those of the series and the shades follow. A new row is blank."""
AXIS_STYLE = LIMIT_STYLE
"""The unmarked axis in the row of throttle marks, which has no limits."""


class Frame(msgspec.Struct, frozen=True):
    """The measures of one frame, in cells of the widget; a low chart gives up rows."""

    height: int
    axis: CellAxis
    time_labels: bool

    @property
    def has_title(self) -> bool:
        """True if there is a row for the title and the keys of the series."""
        return self.height >= 2

    @property
    def has_marks(self) -> bool:
        """True if there is a row for the letters of throttled time."""
        return self.height >= 3

    @property
    def has_times(self) -> bool:
        """True if there is a row for the ends of the time axis."""
        return self.time_labels and self.height >= 6

    @property
    def plot_height(self) -> int:
        """Rows left for the plot."""
        return self.height - self.has_title - self.has_marks - self.has_times


class SeriesColumns(msgspec.Struct, frozen=True):
    """A series as it is drawn: columns of `stride` dots from dot column `first` on."""

    columns: ColumnRanges
    first: int
    stride: int
    """1 for a solid line; with more the line is dotted."""


def plot_rows(
    frame: Frame,
    data: ChartData,
    drawn: list[SeriesColumns],
    y_range: tuple[float, float],
    shades_by_cell: list[Shade | None],
    styles: ChartStyles,
) -> list[list[Segment]]:
    """Return the rows of the plot with the y axis."""
    layers = [_layer(frame, series, y_range) for series in drawn]
    limit_row = None if data.limit is None else _row_of(data.limit.value, y_range, frame)
    labels = _axis_labels(frame, data, y_range, limit_row)
    cell_styles = [Style.null(), styles.limit, styles.mark, *(styles.series(series.tone) for series in data.series)]
    shaded = list(enumerate(_cells_by_shade(shades_by_cell), len(cell_styles)))
    cell_styles += [styles.shade(shade) for _, (shade, _) in shaded]
    cursor = -1 if data.cursor_ns is None else frame.axis.cell_of(data.cursor_ns)
    rows = []
    for row in range(frame.plot_height):
        text, style_indexes = _merge(frame, layers, row)
        if data.limit is not None and row == limit_row:
            _overlay_limit(text, style_indexes, data.limit)
        if not frame.has_marks and row == frame.plot_height - 1:
            # Without a row of marks the letters take the free cells of the last row.
            for _, (shade, cells) in shaded:
                _fill_free(text, style_indexes, cells, shade.letter, MARK_STYLE)
        if 0 <= cursor < frame.axis.count:
            _fill_free(text, style_indexes, (cursor,), "│", MARK_STYLE)
        for style_index, (shade, cells) in shaded:
            _fill_free(text, style_indexes, cells, shade.glyph, style_index)
        gutter = y_axis(frame, labels.get(row, ""), styles, is_limit=row == limit_row)
        rows.append(gutter + styled_segments(text, style_indexes, cell_styles))
    return rows


def _layer(frame: Frame, series: SeriesColumns, y_range: tuple[float, float]) -> bytearray:
    """Return the dots of one series in the cells of the plot, row by row."""
    width, height = frame.axis.count, frame.plot_height
    cells = bytearray(width * height)
    draw(cells, width, height, series.columns, y_range, first=series.first, stride=series.stride)
    return cells


def _fill_free(text: list[str], style_indexes: bytearray, cells: Iterable[int], glyph: str, style_index: int) -> None:
    """Write the glyph into those of the cells that are empty."""
    for cell in cells:
        if style_indexes[cell] == BLANK_STYLE:
            text[cell], style_indexes[cell] = glyph, style_index


def _cells_by_shade(shades_by_cell: list[Shade | None]) -> list[tuple[Shade, list[int]]]:
    """Return the throttled cells by shade."""
    # By identity: hashing a shade for every cell would take longer than drawing it.
    by_shade: dict[int, tuple[Shade, list[int]]] = {}
    for cell, shade in enumerate(shades_by_cell):
        if shade is not None:
            by_shade.setdefault(id(shade), (shade, []))[1].append(cell)
    return list(by_shade.values())


def _merge(frame: Frame, layers: list[bytearray], row: int) -> tuple[list[str], bytearray]:
    """Return the characters of one row and the index of each one's style; the first series is in front."""
    width = frame.axis.count
    style_indexes = bytearray(width)
    masks = 0
    for index in range(len(layers) - 1, -1, -1):
        cells = layers[index][row * width : (row + 1) * width]
        if not any(cells):
            continue
        masks |= int.from_bytes(cells, "big")
        for cell, mask in enumerate(cells):
            if mask:
                style_indexes[cell] = FIRST_SERIES_STYLE + index
    if not masks:
        return [" "] * width, style_indexes
    return list(map(GLYPHS.__getitem__, masks.to_bytes(width, "big"))), style_indexes


def _row_of(value: float, y_range: tuple[float, float], frame: Frame) -> int:
    """Return the row of the plot for `value`."""
    bottom_dot = (frame.plot_height << Y_BITS) - 1
    dot = int((value - y_range[0]) * (bottom_dot / (y_range[1] - y_range[0])) + 0.5)
    return (bottom_dot - min(max(dot, 0), bottom_dot)) >> Y_BITS


def _overlay_limit(text: list[str], style_indexes: bytearray, limit: Limit) -> None:
    """Draw the limit's line in the free cells of its row, and its label in the first gap that is wide enough."""
    _fill_free(text, style_indexes, range(len(text)), "╌", LIMIT_STYLE)
    label = plain(limit.label)
    # Wide characters would need two cells for one entry of the row.
    if not label or cell_len(label) != len(label):
        return
    begin = style_indexes.find(bytes([LIMIT_STYLE]) * (len(label) + 2))
    if begin >= 0:
        text[begin + 1 : begin + 1 + len(label)] = label


def _axis_labels(frame: Frame, data: ChartData, y_range: tuple[float, float], limit_row: int | None) -> dict[int, str]:
    """Return the y label of each labelled row; the limit's label replaces a tick's."""
    if not frame.axis.gutter:
        return {}
    low, high = y_range
    ticks = {0: high}
    if frame.plot_height >= 2:
        ticks[frame.plot_height - 1] = low
    if frame.plot_height >= 5:
        middle = low + (high - low) / 2
        ticks[_row_of(middle, y_range, frame)] = middle
    if data.limit is not None and limit_row is not None:
        ticks[limit_row] = data.limit.value
    texts = {row: plain(data.format_value(value)) for row, value in sorted(ticks.items())}
    # A range narrower than the unit's precision would print one figure twice.
    for above, below in pairwise(list(texts)):
        if texts[above] == texts[below] and below != limit_row:
            texts[below] = ""
    return texts


def y_axis(frame: Frame, label: str, styles: ChartStyles, *, is_limit: bool = False) -> list[Segment]:
    """Return the cells left of the plot in one row: the label and the axis."""
    if not frame.axis.gutter:
        return []
    axis = "┤" if label else "│"
    text = to_width(label, frame.axis.gutter - 2, "right")
    return [Segment(f"{text} {axis}", styles.limit if is_limit and label else styles.axis)]


def styled_segments(text: list[str], style_indexes: bytearray, styles: Sequence[Style]) -> list[Segment]:
    """Return one row in few segments, each cell in its style; a blank cell takes its neighbour's."""
    segments: list[Segment] = []
    start, index = 0, style_indexes[0]
    for cell in range(1, len(style_indexes)):
        next_index = style_indexes[cell]
        if next_index in (index, BLANK_STYLE):
            continue
        if index == BLANK_STYLE:
            index = next_index
            continue
        segments.append(Segment("".join(text[start:cell]), styles[index]))
        start, index = cell, next_index
    segments.append(Segment("".join(text[start:]), styles[index]))
    return segments

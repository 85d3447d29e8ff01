"""The widget of one strip chart."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise

import msgspec
from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style

from trainfast_tui.charts.chart_data import (
    GLYPHS,
    X_BITS,
    Y_BITS,
    CellAxis,
    ChartData,
    ColumnRanges,
    Limit,
    Series,
    YRange,
    cell_axis,
    draw,
    extremes,
    time_columns,
    update_y_range,
    worst_last,
)
from trainfast_tui.painting import Palette, RowWidget, SegmentRows
from trainfast_tui.text.event_words import Shade, severity_rank, shade_of
from trainfast_tui.text.format import duration, plain, to_width, truncate


class StripChart(RowWidget):
    """Draws the newest `ChartData`; sends only the cells that changed.

    Give its container the border: a border on the chart would be sent again with it.
    """

    def __init__(
        self, *, time_labels: bool = True, gutter: int = 10, id: str | None = None, classes: str | None = None
    ) -> None:
        super().__init__(id=id, classes=classes)
        self._time_labels = time_labels
        self._gutter = gutter
        self._data: ChartData | None = None
        self._y_range = YRange()

    def show_chart(self, data: ChartData) -> None:
        """Draw this; the y range is fitted afresh for another title, `y_range_key`, or fixed end of the y axis."""
        if self._data is not None and _axis_of(self._data) != _axis_of(data):
            self._y_range.reset()
        self._data = data
        self.repaint()

    def rows(self, width: int, height: int, palette: Palette) -> SegmentRows:
        data, y_range = self._data, self._y_range
        if data is None:
            return []
        return paint(data, width, height, y_range, palette, time_labels=self._time_labels, gutter=self._gutter)


def _axis_of(data: ChartData) -> tuple[object, ...]:
    return data.title, data.y_range_key, data.y_min, data.y_max, data.binary


BLANK_STYLE, LIMIT_STYLE, MARK_STYLE, FIRST_SERIES_STYLE = range(4)
"""Indexes into the styles of a row; those of the series and the shades follow. A new row is blank."""
AXIS_STYLE = LIMIT_STYLE
"""The unmarked axis in the row of throttle marks, which has no limits."""


class Frame(msgspec.Struct, frozen=True):
    """The measures of one frame, in cells of the widget; a low chart gives up rows."""

    axis: CellAxis
    has_title: bool
    """True if there is a row for the title and the keys of the series."""
    has_marks: bool
    """True if there is a row for the letters of throttled time."""
    has_times: bool
    """True if there is a row for the ends of the time axis."""
    plot_height: int
    """Rows left for the plot."""


def _frame_of(height: int, axis: CellAxis, time_labels: bool) -> Frame:
    has_title, has_marks, has_times = height >= 2, height >= 3, time_labels and height >= 6
    return Frame(axis, has_title, has_marks, has_times, height - has_title - has_marks - has_times)


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
    cell_styles = [Style.null(), styles.limit, styles.mark, *(styles.by_tone[series.tone] for series in data.series)]
    shaded = list(enumerate(_cells_by_shade(shades_by_cell), len(cell_styles)))
    cell_styles += [styles.shade(shade) for _, (shade, _) in shaded]
    cursor = -1 if data.cursor_ns is None else frame.axis.cell_of(data.cursor_ns)
    rows = []
    for row in range(frame.plot_height):
        text, style_indexes = _merge(frame, layers, row)
        if data.limit is not None and row == limit_row:
            _overlay_limit(text, style_indexes, data.limit)
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


_SOLID, _DOTTED = 1, 2
"""Strides of the first series and of the second."""
_KEY_TEXTURES = {_SOLID: "⠤⠤", _DOTTED: "⠄⠄"}
"""The texture of a series in its key, by its stride."""
_MARK_LABEL = "throttle"


def paint(
    data: ChartData,
    width: int,
    height: int,
    y_range: YRange,
    palette: Palette,
    *,
    time_labels: bool = True,
    gutter: int = 10,
) -> list[list[Segment]]:
    """Return the chart as `height` rows of segments, each exactly `width` cells wide.

    `gutter` cells at the left hold the y labels and the axis; it is dropped if fewer than 10 cells would be left
    for the plot. `y_range` is updated. A low chart gives up rows: time labels below a height of 6, throttle marks
    below 3, the title below 2.
    """
    if width <= 0 or height <= 0:
        return [[] for _ in range(height)]
    frame = _frame_of(height, cell_axis(width, gutter, data.axis), time_labels)
    styles = ChartStyles(palette)
    drawn = [
        _series_columns(frame.axis, series, data.gap_ns, _DOTTED if index else _SOLID)
        for index, series in enumerate(data.series)
    ]
    ends = [bounds for series in drawn if (bounds := extremes(series.columns)) is not None]
    shades_by_cell = _throttled_cells(frame.axis, data)
    rows: list[list[Segment]] = []
    if frame.has_title:
        rows.append(_title_row(width, data, drawn, styles))
    if ends:
        rows += plot_rows(frame, data, drawn, update_y_range(y_range, data, ends), shades_by_cell, styles)
    else:
        rows += _empty_rows(frame, data, styles)
    if frame.has_marks:
        rows.append(_mark_row(frame, shades_by_cell, styles))
    if frame.has_times:
        rows.append(_time_row(frame, data, shades_by_cell, styles))
    return rows


def _series_columns(axis: CellAxis, series: Series, gap_ns: int, stride: int) -> SeriesColumns:
    """Return the series in columns of `stride` dots, at whole columns of absolute time."""
    dot_ns = axis.cell_ns >> X_BITS
    column_ns = dot_ns * stride
    start_ns = axis.start_ns // column_ns * column_ns
    count = -(-(axis.count << X_BITS) // stride) + (start_ns < axis.start_ns)
    columns = time_columns(series.times_ns, series.values, start_ns, column_ns, count, gap_ns)
    return SeriesColumns(columns, (start_ns - axis.start_ns) // dot_ns, stride)


def _throttled_cells(axis: CellAxis, data: ChartData) -> list[Shade | None]:
    """Return the shade of each cell of the plot; None if no device was throttled."""
    shades_by_cell: list[Shade | None] = [None] * axis.count
    for span in worst_last(data.spans):
        shade = shade_of(span.cause)
        last = min(axis.cell_of(min(span.end_ns, data.axis.end_ns)), axis.count - 1)
        for cell in range(max(0, axis.cell_of(span.start_ns)), last + 1):
            shades_by_cell[cell] = shade
    return shades_by_cell


MEDIAN_CELLS = 16
"""Cells of a median after the newest value."""


def _title_row(width: int, data: ChartData, series_columns: list[SeriesColumns], styles: ChartStyles) -> list[Segment]:
    """Return the title, and at the right the key and newest value of as many series as fit."""
    title = plain(data.title)
    keys: list[Segment] = []
    used_cells = 0
    for index, (series, columns) in enumerate(zip(data.series, series_columns, strict=True)):
        name, value = plain(series.name), _newest_words(series, data)
        if series.median is not None and cell_len(f"{title}    {name} {value}") <= width - MEDIAN_CELLS:
            value += f", median {plain(data.format_value(series.median))}"
        named = len(data.series) > 1 or (name not in ("", title))
        swatch = f"{_KEY_TEXTURES[columns.stride]} {name} " if named else ""
        spacing = "  " if keys else ""
        length = cell_len(spacing) + cell_len(swatch) + cell_len(value)
        if index and used_cells + length + 1 > width:
            break
        keys.append(Segment(spacing + swatch, styles.by_tone[series.tone]))
        keys.append(Segment(value, styles.title))
        used_cells += length
    if used_cells > width:
        value = to_width(value, width, "right")
        return [Segment(value, styles.title)]
    left = truncate(title, max(0, width - used_cells - 1))
    padding = " " * (width - used_cells - cell_len(left))
    return [Segment(left + padding, styles.title), *(part for part in keys if part.text)]


def _newest_words(series: Series, data: ChartData) -> str:
    """Return the latest value on the axis, called the last one where a median stands elsewhere."""
    value = plain(data.format_value(_newest(series, data)))
    return value if series.median is None else f"last {value}"


def _newest(series: Series, data: ChartData) -> float | None:
    """Return the latest value on the axis; None if it is absent or older than the gap."""
    for time_ns, value in zip(reversed(series.times_ns), reversed(series.values), strict=False):
        if time_ns <= data.axis.end_ns:
            return value if data.axis.end_ns - time_ns <= data.gap_ns else None
    return None


def _empty_rows(frame: Frame, data: ChartData, styles: ChartStyles) -> list[list[Segment]]:
    """Return an empty plot with the chart's own sentence in the middle."""
    room = frame.axis.count
    sentence = truncate(plain(data.empty), room)
    left = " " * ((room - cell_len(sentence)) // 2)
    lines = [" " * room] * frame.plot_height
    lines[(frame.plot_height - 1) // 2] = to_width(left + sentence, room)
    return [[*y_axis(frame, "", styles), Segment(line, styles.axis)] for line in lines]


def _mark_row(frame: Frame, shades_by_cell: list[Shade | None], styles: ChartStyles) -> list[Segment]:
    """Return the line under the plot, with a letter for each cell of throttled time."""
    segments = []
    if frame.axis.gutter:
        label = _MARK_LABEL if any(shades_by_cell) else ""
        text = to_width(label, frame.axis.gutter - 2, "right")
        segments = [Segment(text, styles.mark), Segment(" └", styles.axis)]
    style_indexes = bytearray(MARK_STYLE if shade else AXIS_STYLE for shade in shades_by_cell)
    letters = [shade.letter if shade else "─" for shade in shades_by_cell]
    return segments + styled_segments(letters, style_indexes, [styles.axis, styles.axis, styles.mark])


def _time_row(frame: Frame, data: ChartData, shades_by_cell: list[Shade | None], styles: ChartStyles) -> list[Segment]:
    """Return the ages of both edges and between them the legend of the shades.

    A cause that is covered by a worse one everywhere is named with a plus.
    """
    room = frame.axis.count
    right = truncate(plain(data.axis.end_label), room)
    left = truncate("-" + duration((data.axis.end_ns - data.axis.start_ns) / 1e9), room - cell_len(right) - 1)
    between = room - cell_len(left) - cell_len(right)
    legend: list[Segment] = []
    shades = {shade for shade in shades_by_cell if shade is not None}
    spans = (span for span in data.spans if span.start_ns <= data.axis.end_ns and span.end_ns >= data.axis.start_ns)
    covered = {shade_of(span.cause) for span in spans} - shades
    for shade in [*sorted(shades, key=severity_rank), *sorted(covered, key=severity_rank)]:
        sign = shade.glyph * 2 if shade in shades else "+"
        swatch = f"  {sign} {shade.letter} "
        if between < cell_len(swatch) + cell_len(shade.words) + 2:
            break
        legend += [Segment(swatch, styles.shade(shade, bold=True)), Segment(shade.words, styles.axis)]
        between -= cell_len(swatch) + cell_len(shade.words)
    start = Segment(" " * frame.axis.gutter + left, styles.axis)
    return [start, *legend, Segment(" " * between + right, styles.axis)]


class ChartStyles:
    """The styles of one frame, from those of the tones; axis, limits and shades are never bold."""

    def __init__(self, palette: Palette) -> None:
        self.by_tone = palette
        """The styles of the series."""
        self.title, self.mark = palette["title"], palette["warning"]
        """The styles of the title, and of the throttle marks and the cursor."""
        self.axis, self.limit = _thin(palette["muted"]), _thin(palette["error"])

    def shade(self, shade: Shade, *, bold: bool = False) -> Style:
        """Return the style of throttled time, bold for its letter and sample in the legend."""
        thin = _thin(self.by_tone[shade.tone])
        return Style(color=thin.color, bold=True) if bold else thin


@lru_cache(maxsize=64)
def _thin(style: Style) -> Style:
    return Style(color=style.color, dim=style.dim)

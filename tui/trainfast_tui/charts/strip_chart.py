"""The widget of one strip chart."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style

from trainfast_tui.charts.chart_data import (
    GLYPHS,
    X_BITS,
    Y_BITS,
    ChartData,
    ColumnRanges,
    Limit,
    Series,
    YRange,
    cell_axis,
    draw,
    time_columns,
    worst_last,
)
from trainfast_tui.painting import Palette, RowWidget, SegmentRows
from trainfast_tui.text.event_words import Shade, severity_rank, shade_of
from trainfast_tui.text.format import duration, plain, to_width, truncate


class StripChart(RowWidget):
    """Draws the newest `ChartData`; sends only the cells that changed.

    Give its container the border: a border on the chart would be sent again with it.
    """

    def __init__(self, *, time_labels: bool = True, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self._time_labels = time_labels
        self._data: ChartData | None = None
        self._y_range = YRange()

    def show_chart(self, data: ChartData) -> None:
        """Draw this; the y range is fitted afresh for another title, `y_range_key`, or fixed end of the y axis."""
        if self._data is not None and _axis_of(self._data) != _axis_of(data):
            self._y_range.reset()
        self._data = data
        self.repaint()

    def rows(self, width: int, height: int, palette: Palette) -> SegmentRows:
        if self._data is None:
            return []
        return paint(self._data, width, height, self._y_range, palette, time_labels=self._time_labels)


def _axis_of(data: ChartData) -> tuple[object, ...]:
    return data.title, data.y_range_key, data.y_min, data.y_max, data.binary


def paint(
    data: ChartData, width: int, height: int, y_range: YRange, palette: Palette, *, time_labels: bool = True
) -> SegmentRows:
    """Return the chart as `height` rows of segments, each exactly `width` cells wide; `y_range` is updated.

    A low chart gives up rows: time labels below a height of 6, throttle marks below 3, the title below 2.
    """
    if width <= 0 or height <= 0:
        return [[] for _ in range(height)]
    has_title, has_marks, has_times = height >= 2, height >= 3, time_labels and height >= 6
    picture = _Picture(data, width, height - has_title - has_marks - has_times, palette)
    rows = [picture.title_row(width)] if has_title else []
    rows += picture.plot_rows(y_range)
    if has_marks:
        rows.append(picture.mark_row())
    if has_times:
        rows.append(picture.time_row())
    return rows


BLANK_STYLE, LIMIT_STYLE, MARK_STYLE, FIRST_SERIES_STYLE = range(4)
"""Indexes into the styles of a row; those of the series and the shades follow. A new row is blank."""
AXIS_STYLE = LIMIT_STYLE
"""The unmarked axis in the row of throttle marks, which has no limits."""
_SOLID, _DOTTED = 1, 2
"""Strides of the first series and of the second, in columns of dots."""
_KEY_TEXTURES = ("⠤⠤", "⠄⠄")
"""The texture in the key of the first series and of the second."""
_MARK_LABEL = "throttle"
MEDIAN_CELLS = 16
"""Cells of a median after the newest value."""


class _Picture:
    """One frame of a chart. Axis, limit and shades are never bold."""

    def __init__(self, data: ChartData, width: int, plot_height: int, palette: Palette) -> None:
        self._data, self._height, self._by_tone = data, plot_height, palette
        self._axis = cell_axis(width, data.axis)
        self._title_style, self._mark_style = palette["title"], palette["warning"]
        self._axis_style, self._limit_style = _thin(palette["muted"]), _thin(palette["error"])
        self._shades: list[Shade | None] = [None] * self._axis.count
        """The shade of each cell of the plot; None if no device was throttled."""
        for span in worst_last(data.spans):
            last = min(self._axis.cell_of(min(span.end_ns, data.axis.end_ns)), self._axis.count - 1)
            for cell in range(max(0, self._axis.cell_of(span.start_ns)), last + 1):
                self._shades[cell] = shade_of(span.cause)

    def plot_rows(self, y_range: YRange) -> SegmentRows:
        """Return the rows of the plot with the y axis; without a value the chart's own sentence in the middle."""
        data, count = self._data, self._axis.count
        drawn = [self._columns(series, _DOTTED if at else _SOLID) for at, series in enumerate(data.series)]
        values = [value for columns, _ in drawn for column in columns if column is not None for value in column]
        if not values:
            return self._empty_rows()
        values += [] if data.limit is None else [data.limit.value]
        bounds = y_range.fit(
            min(values), max(values), data.axis.end_ns, y_min=data.y_min, y_max=data.y_max, binary=data.binary
        )
        layers = []
        for at, (columns, first) in enumerate(drawn):
            layers.append(bytearray(count * self._height))
            draw(layers[-1], count, self._height, columns, bounds, first=first, stride=_DOTTED if at else _SOLID)
        limit_row = None if data.limit is None else self._row_of(data.limit.value, bounds)
        labels = self._labels(bounds, limit_row)
        styles = [Style.null(), self._limit_style, self._mark_style]
        styles += [self._by_tone[series.tone] for series in data.series]
        shaded = list(enumerate(_cells_by_shade(self._shades), len(styles)))
        styles += [self._shade_style(shade) for _, (shade, _) in shaded]
        cursor = -1 if data.cursor_ns is None else self._axis.cell_of(data.cursor_ns)
        rows = []
        for row in range(self._height):
            text, style_indexes = _merge([layer[row * count : (row + 1) * count] for layer in layers], count)
            if data.limit is not None and row == limit_row:
                _overlay_limit(text, style_indexes, data.limit)
            if 0 <= cursor < count:
                _fill_free(text, style_indexes, (cursor,), "│", MARK_STYLE)
            for style_index, (shade, cells) in shaded:
                _fill_free(text, style_indexes, cells, shade.glyph, style_index)
            axis = self._y_axis(labels.get(row, ""), is_limit=row == limit_row)
            rows.append(axis + styled_segments(text, style_indexes, styles))
        return rows

    def _columns(self, series: Series, stride: int) -> tuple[ColumnRanges, int]:
        """Return the series in columns of `stride` dots, at whole columns of absolute time, and the first's place."""
        axis = self._axis
        dot_ns = axis.cell_ns >> X_BITS
        column_ns = dot_ns * stride
        start_ns = axis.start_ns // column_ns * column_ns
        count = -(-(axis.count << X_BITS) // stride) + (start_ns < axis.start_ns)
        columns = time_columns(series.times_ns, series.values, start_ns, column_ns, count, self._data.gap_ns)
        return columns, (start_ns - axis.start_ns) // dot_ns

    def _empty_rows(self) -> SegmentRows:
        count = self._axis.count
        sentence = truncate(plain(self._data.empty), count)
        left = " " * ((count - cell_len(sentence)) // 2)
        lines = [" " * count] * self._height
        lines[(self._height - 1) // 2] = to_width(left + sentence, count)
        return [[*self._y_axis(""), Segment(line, self._axis_style)] for line in lines]

    def _row_of(self, value: float, bounds: tuple[float, float]) -> int:
        """Return the row of the plot for `value`."""
        bottom_dot = (self._height << Y_BITS) - 1
        dot = int((value - bounds[0]) * (bottom_dot / (bounds[1] - bounds[0])) + 0.5)
        return (bottom_dot - min(max(dot, 0), bottom_dot)) >> Y_BITS

    def _labels(self, bounds: tuple[float, float], limit_row: int | None) -> dict[int, str]:
        """Return the y label of each labelled row; the limit's label replaces a tick's."""
        low, high = bounds
        ticks = {0: high}
        if self._height >= 2:
            ticks[self._height - 1] = low
        if self._height >= 5:
            middle = low + (high - low) / 2
            ticks[self._row_of(middle, bounds)] = middle
        if self._data.limit is not None and limit_row is not None:
            ticks[limit_row] = self._data.limit.value
        texts = {row: plain(self._data.format_value(value)) for row, value in sorted(ticks.items())}
        # A range narrower than the unit's precision would print one figure twice.
        for above, below in pairwise(list(texts)):
            if texts[above] == texts[below] and below != limit_row:
                texts[below] = ""
        return texts

    def _y_axis(self, label: str, *, is_limit: bool = False) -> list[Segment]:
        """Return the cells left of the plot in one row: the label and the axis."""
        if not self._axis.gutter:
            return []
        text = to_width(label, self._axis.gutter - 2, "right")
        style = self._limit_style if is_limit and label else self._axis_style
        return [Segment(f"{text} {'┤' if label else '│'}", style)]

    def title_row(self, width: int) -> list[Segment]:
        """Return the title, and at the right the key and newest value of as many series as fit."""
        data = self._data
        title = plain(data.title)
        keys: list[Segment] = []
        used_cells = 0
        for index, series in enumerate(data.series):
            name, value = plain(series.name), self._newest_words(series)
            if series.median is not None and cell_len(f"{title}    {name} {value}") <= width - MEDIAN_CELLS:
                value += f", median {plain(data.format_value(series.median))}"
            named = len(data.series) > 1 or (name not in ("", title))
            swatch = f"{_KEY_TEXTURES[index]} {name} " if named else ""
            spacing = "  " if keys else ""
            length = cell_len(spacing) + cell_len(swatch) + cell_len(value)
            if index and used_cells + length + 1 > width:
                break
            keys += [Segment(spacing + swatch, self._by_tone[series.tone]), Segment(value, self._title_style)]
            used_cells += length
        if used_cells > width:
            return [Segment(to_width(value, width, "right"), self._title_style)]
        left = to_width(truncate(title, max(0, width - used_cells - 1)), width - used_cells)
        return [Segment(left, self._title_style), *(part for part in keys if part.text)]

    def _newest_words(self, series: Series) -> str:
        """Return the latest value on the axis, absent if older than the gap; called the last one beside a median."""
        end_ns, newest = self._data.axis.end_ns, None
        for time_ns, value in zip(reversed(series.times_ns), reversed(series.values), strict=False):
            if time_ns <= end_ns:
                newest = value if end_ns - time_ns <= self._data.gap_ns else None
                break
        words = plain(self._data.format_value(newest))
        return words if series.median is None else f"last {words}"

    def mark_row(self) -> list[Segment]:
        """Return the line under the plot, with a letter for each cell of throttled time."""
        segments = []
        if self._axis.gutter:
            text = to_width(_MARK_LABEL if any(self._shades) else "", self._axis.gutter - 2, "right")
            segments = [Segment(text, self._mark_style), Segment(" └", self._axis_style)]
        style_indexes = bytearray(MARK_STYLE if shade else AXIS_STYLE for shade in self._shades)
        letters = [shade.letter if shade else "─" for shade in self._shades]
        return segments + styled_segments(letters, style_indexes, [self._axis_style] * 2 + [self._mark_style])

    def time_row(self) -> list[Segment]:
        """Return the ages of both edges and between them the legend of the shades.

        A cause that is covered by a worse one everywhere is named with a plus.
        """
        axis, room = self._data.axis, self._axis.count
        right = truncate("now" if axis.is_live else "end", room)
        left = truncate("-" + duration((axis.end_ns - axis.start_ns) / 1e9), room - cell_len(right) - 1)
        between = room - cell_len(left) - cell_len(right)
        legend: list[Segment] = []
        shades = {shade for shade in self._shades if shade is not None}
        spans = (span for span in self._data.spans if span.start_ns <= axis.end_ns and span.end_ns >= axis.start_ns)
        covered = {shade_of(span.cause) for span in spans} - shades
        for shade in [*sorted(shades, key=severity_rank), *sorted(covered, key=severity_rank)]:
            swatch = f"  {shade.glyph * 2 if shade in shades else '+'} {shade.letter} "
            if between < cell_len(swatch) + cell_len(shade.words) + 2:
                break
            bold = Style(color=self._by_tone[shade.tone].color, bold=True)
            legend += [Segment(swatch, bold), Segment(shade.words, self._axis_style)]
            between -= cell_len(swatch) + cell_len(shade.words)
        start = Segment(" " * self._axis.gutter + left, self._axis_style)
        return [start, *legend, Segment(" " * between + right, self._axis_style)]

    def _shade_style(self, shade: Shade) -> Style:
        return _thin(self._by_tone[shade.tone])


def _merge(layers: list[bytearray], width: int) -> tuple[list[str], bytearray]:
    """Return the characters of one row and the index of each one's style; the first series is in front."""
    style_indexes = bytearray(width)
    masks = 0
    for index in range(len(layers) - 1, -1, -1):
        if any(layers[index]):
            masks |= int.from_bytes(layers[index], "big")
            for cell, mask in enumerate(layers[index]):
                if mask:
                    style_indexes[cell] = FIRST_SERIES_STYLE + index
    if not masks:
        return [" "] * width, style_indexes
    return list(map(GLYPHS.__getitem__, masks.to_bytes(width, "big"))), style_indexes


def _fill_free(text: list[str], style_indexes: bytearray, cells: Iterable[int], glyph: str, style_index: int) -> None:
    """Write the glyph into those of the cells that are empty."""
    for cell in cells:
        if style_indexes[cell] == BLANK_STYLE:
            text[cell], style_indexes[cell] = glyph, style_index


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


def _cells_by_shade(shades_by_cell: list[Shade | None]) -> list[tuple[Shade, list[int]]]:
    """Return the throttled cells by shade."""
    # By identity: hashing a shade for every cell would take longer than drawing it.
    by_shade: dict[int, tuple[Shade, list[int]]] = {}
    for cell, shade in enumerate(shades_by_cell):
        if shade is not None:
            by_shade.setdefault(id(shade), (shade, []))[1].append(cell)
    return list(by_shade.values())


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


@lru_cache(maxsize=64)
def _thin(style: Style) -> Style:
    return Style(color=style.color, dim=style.dim)

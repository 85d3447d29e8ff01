"""The widget of one strip chart."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import compress, pairwise

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip

from trainfast_tui.charts.chart_data import (
    GLYPHS,
    X_BITS,
    Y_BITS,
    ChartData,
    ColumnRanges,
    Series,
    YRange,
    cell_axis,
    draw,
    time_columns,
    worst_last,
)
from trainfast_tui.painting import Palette, RowWidget
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
            self._y_range = YRange()
        self._data = data
        self.repaint()

    def rows(self, width: int, height: int, palette: Palette) -> list[Strip]:
        if self._data is None:
            return [Strip.blank(width, palette["text"])] * height
        rows = paint(self._data, width, height, self._y_range, palette, time_labels=self._time_labels)
        return [Strip(row, width) for row in rows]


def _axis_of(data: ChartData) -> tuple[object, ...]:
    return data.title, data.y_range_key, data.y_min, data.y_max, data.binary


def paint(
    data: ChartData, width: int, height: int, y_range: YRange, palette: Palette, *, time_labels: bool = True
) -> list[list[Segment]]:
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


KEY_TEXTURES = ("⠤⠤", "⠄⠄")
"""The texture in the key of the first series and of the second."""
Styles = list[Style | None]
"""The style of each cell; a cell without one is free."""


class _Picture:
    """One frame of a chart. Axis, limit and shades are never bold."""

    def __init__(self, data: ChartData, width: int, plot_height: int, palette: Palette) -> None:
        self._data, self._height, self._by_tone = data, plot_height, palette
        self._axis = cell_axis(width, data.axis)
        self._axis_style, self._limit_style = _thin(palette["muted"]), _thin(palette["error"])
        self._throttled: dict[int, Shade] = {}
        """The shade of each throttled cell of a row."""
        for span in worst_last(data.spans):
            last = min(self._axis.cell_of(min(span.end_ns, data.axis.end_ns)), self._axis.count - 1)
            cells = range(max(0, self._axis.cell_of(span.start_ns)), last + 1)
            self._throttled |= dict.fromkeys(cells, shade_of(span.cause))

    def plot_rows(self, y_range: YRange) -> list[list[Segment]]:
        """Return the rows of the plot with the y axis; without a value the chart's own sentence in the middle."""
        data, count, limit = self._data, self._axis.count, self._data.limit
        drawn = [(*self._columns(series, stride), stride, series) for stride, series in enumerate(data.series, 1)]
        values = [value for columns, *_ in drawn for column in columns if column is not None for value in column]
        if not values:
            return self._empty_rows()
        values += [] if limit is None else [limit.value]
        bounds = y_range.fit(
            min(values), max(values), data.axis.end_ns, y_min=data.y_min, y_max=data.y_max, binary=data.binary
        )
        size = count * self._height
        masks, styles = bytearray(size), Styles([None] * size)
        for columns, first, stride, series in reversed(drawn):
            layer = bytearray(size)
            draw(layer, count, self._height, columns, bounds, first=first, stride=stride)
            style = self._by_tone[series.tone]
            for cell in compress(range(size), layer):
                masks[cell] |= layer[cell]
                styles[cell] = style
        text = [GLYPHS[mask] for mask in masks]
        limit_row = -1 if limit is None else self._row_of(limit.value, bounds)
        if limit is not None:
            row = slice(limit_row * count, (limit_row + 1) * count)
            _fill_free(text, styles, range(size)[row], "╌", self._limit_style)
            label = plain(limit.label)
            begin = row.start + "".join(text[row]).find("╌" * (len(label) + 2))
            # Wide characters would need two cells for one entry of the row.
            if begin >= row.start and cell_len(label) == len(label):
                text[begin + 1 : begin + 1 + len(label)] = label
        cursor = -1 if data.cursor_ns is None else self._axis.cell_of(data.cursor_ns)
        if 0 <= cursor < count:
            _fill_free(text, styles, range(cursor, size, count), "│", self._by_tone["warning"])
        for cell, shade in self._throttled.items():
            _fill_free(text, styles, range(cell, size, count), shade.glyph, _thin(self._by_tone[shade.tone]))
        labels = self._labels(bounds, limit_row)
        return [
            self._y_axis(labels.get(row, ""), is_limit=row == limit_row)
            + _segments(text[row * count : (row + 1) * count], styles[row * count : (row + 1) * count])
            for row in range(self._height)
        ]

    def _columns(self, series: Series, stride: int) -> tuple[ColumnRanges, int]:
        """Return the series in columns of `stride` dots, at whole columns of absolute time, and the first's place."""
        axis = self._axis
        dot_ns = axis.cell_ns >> X_BITS
        column_ns = dot_ns * stride
        start_ns = axis.start_ns // column_ns * column_ns
        count = -(-(axis.count << X_BITS) // stride) + (start_ns < axis.start_ns)
        columns = time_columns(series.times_ns, series.values, start_ns, column_ns, count, self._data.gap_ns)
        return columns, (start_ns - axis.start_ns) // dot_ns

    def _empty_rows(self) -> list[list[Segment]]:
        count = self._axis.count
        sentence = truncate(plain(self._data.empty), count)
        lines = [" " * count] * self._height
        lines[(self._height - 1) // 2] = to_width(" " * ((count - cell_len(sentence)) // 2) + sentence, count)
        return [[*self._y_axis(""), Segment(line, self._axis_style)] for line in lines]

    def _row_of(self, value: float, bounds: tuple[float, float]) -> int:
        """Return the row of the plot for `value`."""
        bottom_dot = (self._height << Y_BITS) - 1
        dot = int((value - bounds[0]) * (bottom_dot / (bounds[1] - bounds[0])) + 0.5)
        return (bottom_dot - min(max(dot, 0), bottom_dot)) >> Y_BITS

    def _labels(self, bounds: tuple[float, float], limit_row: int) -> dict[int, str]:
        """Return the y label of each labelled row; the limit's label replaces a tick's."""
        low, high = bounds
        ticks = {0: high}
        if self._height >= 2:
            ticks[self._height - 1] = low
        if self._height >= 5:
            middle = low + (high - low) / 2
            ticks[self._row_of(middle, bounds)] = middle
        if self._data.limit is not None:
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
        data, style = self._data, self._by_tone["title"]
        title = plain(data.title)
        keys: list[Segment] = []
        used_cells = 0
        for texture, series in zip(KEY_TEXTURES, data.series, strict=False):
            name, value = plain(series.name), self._newest_words(series)
            swatch = f"{texture} {name} " if len(data.series) > 1 or name not in ("", title) else ""
            pieces = [Segment("  " * bool(keys) + swatch, self._by_tone[series.tone]), Segment(value, style)]
            cells = sum(piece.cell_length for piece in pieces)
            if not keys and cells > width:
                return [Segment(to_width(value, width, "right"), style)]
            if used_cells + cells + bool(keys) > width:
                break
            keys += pieces
            used_cells += cells
        left = to_width(truncate(title, max(0, width - used_cells - 1)), width - used_cells)
        return [part for part in (Segment(left, style), *keys) if part.text]

    def _newest_words(self, series: Series) -> str:
        """Return the latest known value on the axis, absent if older than the gap."""
        end_ns = self._data.axis.end_ns
        newest = None
        for time_ns, value in zip(reversed(series.times_ns), reversed(series.values), strict=False):
            if time_ns <= end_ns and (value is not None or end_ns - time_ns > self._data.gap_ns):
                newest = value if end_ns - time_ns <= self._data.gap_ns else None
                break
        return plain(self._data.format_value(newest))

    def mark_row(self) -> list[Segment]:
        """Return the line under the plot, with a letter for each cell of throttled time."""
        mark_style, count = self._by_tone["warning"], self._axis.count
        segments = []
        if self._axis.gutter:
            text = to_width("throttle" if self._throttled else "", self._axis.gutter - 2, "right")
            segments = [Segment(text, mark_style), Segment(" └", self._axis_style)]
        letters = [self._throttled[cell].letter if cell in self._throttled else "─" for cell in range(count)]
        styles = [mark_style if cell in self._throttled else self._axis_style for cell in range(count)]
        return segments + _segments(letters, styles)

    def time_row(self) -> list[Segment]:
        """Return the ages of both edges and between them the legend of the shades.

        A cause that is covered by a worse one everywhere is named with a plus.
        """
        axis, room = self._data.axis, self._axis.count
        right = truncate("now" if axis.is_live else "end", room)
        left = truncate("-" + duration((axis.end_ns - axis.start_ns) / 1e9), room - cell_len(right) - 1)
        between = room - cell_len(left) - cell_len(right)
        legend: list[Segment] = []
        shown = set(self._throttled.values())
        spans = (span for span in self._data.spans if span.start_ns <= axis.end_ns and span.end_ns >= axis.start_ns)
        shades = {shade_of(span.cause) for span in spans}
        for shade in sorted(shades, key=lambda shade: (shade not in shown, severity_rank(shade))):
            swatch = f"  {shade.glyph * 2 if shade in shown else '+'} {shade.letter} "
            if between < cell_len(swatch) + cell_len(shade.words) + 2:
                break
            bold = Style(color=self._by_tone[shade.tone].color, bold=True)
            legend += [Segment(swatch, bold), Segment(shade.words, self._axis_style)]
            between -= cell_len(swatch) + cell_len(shade.words)
        start = Segment(" " * self._axis.gutter + left, self._axis_style)
        return [start, *legend, Segment(" " * between + right, self._axis_style)]


def _fill_free(text: list[str], styles: Styles, cells: Iterable[int], glyph: str, style: Style) -> None:
    """Write the glyph into those of the cells that are free."""
    for cell in cells:
        if styles[cell] is None:
            text[cell], styles[cell] = glyph, style


def _segments(text: Sequence[str], styles: Sequence[Style | None]) -> list[Segment]:
    """Return one row in few segments, each cell in its style; a free cell takes its neighbour's."""
    segments: list[Segment] = []
    start, style = 0, styles[0]
    for cell, next_style in enumerate(styles):
        if next_style is None or next_style is style:
            continue
        if style is not None:
            segments.append(Segment("".join(text[start:cell]), style))
            start = cell
        style = next_style
    return [*segments, Segment("".join(text[start:]), style or Style.null())]


@lru_cache(maxsize=64)
def _thin(style: Style) -> Style:
    return Style(color=style.color, dim=style.dim)

"""Turn chart data into rows of segments: about 2 ms a frame at 120x16 with two series.

Charts of one width that are given one window share their time axis cell by cell. The columns are fixed to
absolute time, so a spike keeps its shape while it travels left. Nothing depends on colour alone: series
differ in texture, throttled time in glyphs and letters by its cause, a limit has its own line and label.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style

from trainfast_tui.charts.braille import (
    GLYPHS,
    X_BITS,
    Y_BITS,
    ColumnRanges,
    YRange,
    draw,
    extremes,
    styled_segments,
    time_columns,
)
from trainfast_tui.charts.chart_data import ChartData, Limit, Series
from trainfast_tui.charts.time_axis import TimeCells, time_cells
from trainfast_tui.painting.inks import Palette
from trainfast_tui.text.format import duration, plain, to_width, truncate
from trainfast_tui.text.shades import Shade, severity_order, shade_of

_STRIDES = (1, 2, 4)
_LEGEND_TEXTURES = {1: "⠤⠤", 2: "⠄⠄", 4: "⠄ "}
"""The texture of a series in the legend, by its stride."""
_MARK_LABEL = "throttle"


@dataclass(frozen=True, slots=True)
class _Frame:
    """The measures of one frame, in cells of the widget; a low chart gives up rows."""

    height: int
    axis: TimeCells
    time_labels: bool

    @property
    def has_title(self) -> bool:
        return self.height >= 2

    @property
    def has_marks(self) -> bool:
        return self.height >= 3

    @property
    def has_times(self) -> bool:
        return self.time_labels and self.height >= 6

    @property
    def plot_height(self) -> int:
        return self.height - self.has_title - self.has_marks - self.has_times


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
    frame = _Frame(height, time_cells(width, gutter, data.t_min_ns, data.t_max_ns), time_labels)
    strides = [_STRIDES[min(i, len(_STRIDES) - 1)] for i in range(len(data.series))]
    drawn = [
        _series_columns(frame.axis, series, data.gap_ns, stride)
        for series, stride in zip(data.series, strides, strict=True)
    ]
    held = [bounds for _, columns in drawn if (bounds := extremes(columns)) is not None]
    shades_by_cell = _throttled_cells(frame.axis, data)
    rows: list[list[Segment]] = []
    if frame.has_title:
        rows.append(_title_row(width, data, strides, palette))
    if held:
        rows += _plot_rows(frame, data, drawn, strides, fitted(y_range, data, held), shades_by_cell, palette)
    else:
        rows += _empty_rows(frame, data, palette)
    if frame.has_marks:
        rows.append(_mark_row(frame, shades_by_cell, palette))
    if frame.has_times:
        rows.append(_time_row(frame, data, shades_by_cell, palette))
    return rows


def fitted(y_range: YRange, data: ChartData, held: list[tuple[float, float]]) -> tuple[float, float]:
    """Return the ends of the y axis: around the series and the limits."""
    reach = [limit.value for limit in data.limits]
    return y_range.fit(
        min([low for low, _ in held] + reach),
        max([high for _, high in held] + reach),
        data.t_max_ns,
        y_min=data.y_min,
        y_max=data.y_max,
        binary=data.binary,
    )


def _series_columns(axis: TimeCells, series: Series, gap_ns: int, stride: int) -> tuple[int, ColumnRanges]:
    """Return the dot column of the first column, and the series in columns of `stride` dots."""
    dot_ns = axis.cell_ns >> X_BITS
    column_ns = dot_ns * stride
    start_ns = axis.start_ns // column_ns * column_ns
    count = -(-(axis.count << X_BITS) // stride) + (start_ns < axis.start_ns)
    columns = time_columns(series.times_ns, series.values, start_ns, column_ns, count, gap_ns)
    return (start_ns - axis.start_ns) // dot_ns, columns


def _throttled_cells(axis: TimeCells, data: ChartData) -> list[Shade | None]:
    """Return the shade of each cell of the plot; None if no device was throttled."""
    shades_by_cell: list[Shade | None] = [None] * axis.count
    shaded = [(span, shade_of(span.cause)) for span in data.spans]
    for span, shade in sorted(shaded, key=lambda pair: -severity_order(pair[1])):
        last = min(axis.at(min(span.end_ns, data.t_max_ns)), axis.count - 1)
        for cell in range(max(0, axis.at(span.start_ns)), last + 1):
            shades_by_cell[cell] = shade
    return shades_by_cell


def _title_row(width: int, data: ChartData, strides: list[int], palette: Palette) -> list[Segment]:
    """Return the title, and at the right the key and newest value of as many series as fit."""
    title = plain(data.title)
    legend: list[Segment] = []
    used = 0
    for index, (series, stride) in enumerate(zip(data.series, strides, strict=True)):
        value = plain(data.unit(_newest(series, data)))
        name = plain(series.name)
        named = len(data.series) > 1 or (name not in ("", title))
        swatch = f"{_LEGEND_TEXTURES[stride]} {name} " if named else ""
        spacing = "  " if legend else ""
        length = cell_len(spacing) + cell_len(swatch) + cell_len(value)
        if index and used + length + 1 > width:
            break
        legend.append(Segment(spacing + swatch, palette.get(series.tone)))
        legend.append(Segment(value, palette.get("title")))
        used += length
    if used > width:
        value = to_width(value, width, "right")
        return [Segment(value, palette.get("title"))]
    left = truncate(title, max(0, width - used - 1))
    padding = " " * (width - used - cell_len(left))
    return [Segment(left + padding, palette.get("title")), *(part for part in legend if part.text)]


def _newest(series: Series, data: ChartData) -> float | None:
    """Return the latest value in the window; None if it is absent or older than the gap."""
    for time_ns, value in zip(reversed(series.times_ns), reversed(series.values), strict=False):
        if time_ns <= data.t_max_ns:
            return value if data.t_max_ns - time_ns <= data.gap_ns else None
    return None


def _plot_rows(
    frame: _Frame,
    data: ChartData,
    drawn: list[tuple[int, ColumnRanges]],
    strides: list[int],
    y_range: tuple[float, float],
    shades_by_cell: list[Shade | None],
    palette: Palette,
) -> list[list[Segment]]:
    width, height = frame.axis.count, frame.plot_height
    layers: list[bytearray] = []
    for (first, columns), stride in zip(drawn, strides, strict=True):
        layer = bytearray(width * height)
        draw(layer, width, height, columns, y_range, first=first, stride=stride)
        layers.append(layer)
    limits = {
        _row_of(limit.value, y_range, frame): limit for limit in data.limits if y_range[0] <= limit.value <= y_range[1]
    }
    labels = _axis_labels(frame, data, y_range, limits)
    styles = [
        Style.null(),
        palette.get("limit"),
        palette.get("mark"),
        *(palette.get(series.tone) for series in data.series),
    ]
    shaded = list(enumerate(_cells_by_shade(shades_by_cell), len(styles)))
    styles += [palette.get(shade.cause) or palette.get("mark") for _, (shade, _) in shaded]
    cursor = -1 if data.cursor_ns is None else frame.axis.at(data.cursor_ns)
    rows = []
    for row in range(height):
        text, style_indexes = _merge(frame, layers, row)
        if (limit := limits.get(row)) is not None:
            _overlay_limit(text, style_indexes, limit)
        if not frame.has_marks and row == height - 1:
            # Without a row of marks the letters take the free cells of the last row.
            for _, (shade, cells) in shaded:
                _fill_free(text, style_indexes, cells, shade.letter, _MARK_STYLE)
        if 0 <= cursor < width:
            _fill_free(text, style_indexes, (cursor,), "│", _MARK_STYLE)
        for style_index, (shade, cells) in shaded:
            _fill_free(text, style_indexes, cells, shade.glyph, style_index)
        gutter = _gutter(frame, labels.get(row, ""), palette, limit is not None)
        rows.append(gutter + styled_segments(text, style_indexes, styles))
    return rows


def _fill_free(text: list[str], style_indexes: bytearray, cells: Iterable[int], glyph: str, style_index: int) -> None:
    """Write the glyph into those of the cells that are empty."""
    for cell in cells:
        if not style_indexes[cell]:
            text[cell], style_indexes[cell] = glyph, style_index


def _cells_by_shade(shades_by_cell: list[Shade | None]) -> list[tuple[Shade, list[int]]]:
    """Return the throttled cells by shade."""
    # By identity: hashing a shade for every cell would take longer than drawing it.
    by_shade: dict[int, tuple[Shade, list[int]]] = {}
    for cell, shade in enumerate(shades_by_cell):
        if shade is not None:
            by_shade.setdefault(id(shade), (shade, []))[1].append(cell)
    return list(by_shade.values())


_BLANK_STYLE, _LIMIT_STYLE, _MARK_STYLE, _FIRST_SERIES_STYLE = range(4)


def _merge(frame: _Frame, layers: list[bytearray], row: int) -> tuple[list[str], bytearray]:
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
                style_indexes[cell] = _FIRST_SERIES_STYLE + index
    if not masks:
        return [" "] * width, style_indexes
    return list(map(GLYPHS.__getitem__, masks.to_bytes(width, "big"))), style_indexes


def _row_of(value: float, y_range: tuple[float, float], frame: _Frame) -> int:
    """Return the row of the plot for `value`."""
    bottom_dot = (frame.plot_height << Y_BITS) - 1
    dot = int((value - y_range[0]) * (bottom_dot / (y_range[1] - y_range[0])) + 0.5)
    return (bottom_dot - min(max(dot, 0), bottom_dot)) >> Y_BITS


def _overlay_limit(text: list[str], style_indexes: bytearray, limit: Limit) -> None:
    """Draw the limit's line in the free cells of its row, and its label where it fits first."""
    _fill_free(text, style_indexes, range(len(text)), "╌", _LIMIT_STYLE)
    label = plain(limit.label)
    # Wide characters would need two cells for one entry of the row.
    if not label or cell_len(label) != len(label):
        return
    at = style_indexes.find(bytes([_LIMIT_STYLE]) * (len(label) + 2))
    if at >= 0:
        text[at + 1 : at + 1 + len(label)] = label


def _axis_labels(
    frame: _Frame, data: ChartData, y_range: tuple[float, float], limits: Mapping[int, Limit]
) -> dict[int, str]:
    """Return the y label of each labelled row; a limit's label replaces a tick's."""
    if not frame.axis.gutter:
        return {}
    low, high = y_range
    ticks = {0: high}
    if frame.plot_height >= 2:
        ticks[frame.plot_height - 1] = low
    if frame.plot_height >= 5:
        middle = low + (high - low) / 2
        ticks[_row_of(middle, y_range, frame)] = middle
    ticks.update((row, limit.value) for row, limit in limits.items())
    texts = {row: plain(data.unit(value)) for row, value in sorted(ticks.items())}
    # A range narrower than the unit's precision would print one figure twice.
    for above, below in pairwise(list(texts)):
        if texts[above] == texts[below] and below not in limits:
            texts[below] = ""
    return texts


def _gutter(frame: _Frame, label: str, palette: Palette, is_limit: bool = False) -> list[Segment]:
    if not frame.axis.gutter:
        return []
    axis = "┤" if label else "│"
    text = to_width(label, frame.axis.gutter - 2, "right")
    return [Segment(f"{text} {axis}", palette.get("limit" if is_limit and label else "axis"))]


def _empty_rows(frame: _Frame, data: ChartData, palette: Palette) -> list[list[Segment]]:
    """Return an empty plot with the chart's own sentence in the middle."""
    room = frame.axis.count
    sentence = truncate(plain(data.empty), room)
    left = (room - cell_len(sentence)) // 2
    right = room - left - cell_len(sentence)
    rows = []
    for row in range(frame.plot_height):
        line = " " * left + sentence + " " * right if row == (frame.plot_height - 1) // 2 else " " * room
        rows.append([*_gutter(frame, "", palette), Segment(line, palette.get("empty"))])
    return rows


def _mark_row(frame: _Frame, shades_by_cell: list[Shade | None], palette: Palette) -> list[Segment]:
    """Return the line under the plot, with a letter for each cell of throttled time."""
    segments = []
    if frame.axis.gutter:
        label = _MARK_LABEL if any(shades_by_cell) else ""
        text = to_width(label, frame.axis.gutter - 2, "right")
        segments = [Segment(text, palette.get("mark")), Segment(" └", palette.get("axis"))]
    style_indexes = bytearray(_MARK_STYLE if shade else _LIMIT_STYLE for shade in shades_by_cell)
    styles = [palette.get("axis"), palette.get("axis"), palette.get("mark")]
    return segments + styled_segments(
        [shade.letter if shade else "─" for shade in shades_by_cell], style_indexes, styles
    )


def _time_row(frame: _Frame, data: ChartData, shades_by_cell: list[Shade | None], palette: Palette) -> list[Segment]:
    """Return the ages of both edges and between them the legend of the shades.

    A cause that is covered by a worse one everywhere is named with a plus.
    """
    room = frame.axis.count
    right = truncate(plain(data.now_label), room)
    left = truncate("-" + duration((data.t_max_ns - data.t_min_ns) / 1e9), room - cell_len(right) - 1)
    between = room - cell_len(left) - cell_len(right)
    legend: list[Segment] = []
    drawn = {shade for shade in shades_by_cell if shade is not None}
    spans = (span for span in data.spans if span.start_ns <= data.t_max_ns and span.end_ns >= data.t_min_ns)
    covered = {shade_of(span.cause) for span in spans} - drawn
    for shade in [*sorted(drawn, key=severity_order), *sorted(covered, key=severity_order)]:
        sign = shade.glyph * 2 if shade in drawn else "+"
        swatch = f"  {sign} {shade.letter} "
        if between < cell_len(swatch) + cell_len(shade.words) + 2:
            break
        legend += [Segment(swatch, _ink_of(shade, palette)), Segment(shade.words, palette.get("axis"))]
        between -= cell_len(swatch) + cell_len(shade.words)
    start = Segment(" " * frame.axis.gutter + left, palette.get("axis"))
    return [start, *legend, Segment(" " * between + right, palette.get("axis"))]


def _ink_of(shade: Shade, palette: Palette) -> Style | None:
    own = palette.get(shade.cause)
    return Style(color=own.color, bold=True) if own is not None else palette.get("mark")

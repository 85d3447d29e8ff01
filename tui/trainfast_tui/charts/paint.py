"""Turn chart data into rows of segments.

Charts of one width on one time axis have the same time in each cell. Columns are fixed to absolute time, so a spike
keeps its shape while it travels left. Nothing depends on colour alone.
"""

from rich.cells import cell_len
from rich.segment import Segment

from trainfast_tui.charts.braille import X_BITS
from trainfast_tui.charts.chart_data import ChartData, Series, worst_last
from trainfast_tui.charts.chart_styles import ChartStyles
from trainfast_tui.charts.plot import (
    AXIS_STYLE,
    MARK_STYLE,
    Frame,
    SeriesColumns,
    plot_rows,
    styled_segments,
    y_axis,
)
from trainfast_tui.charts.time_axis import CellAxis, cell_axis
from trainfast_tui.charts.time_columns import extremes, time_columns
from trainfast_tui.charts.y_range import YRange, update_y_range
from trainfast_tui.painting.palettes import Palette
from trainfast_tui.text.format import duration, plain, to_width, truncate
from trainfast_tui.text.shades import Shade, severity_rank, shade_of

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
    frame = Frame(height, cell_axis(width, gutter, data.axis), time_labels)
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
        keys.append(Segment(spacing + swatch, styles.series(series.tone)))
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
    left = (room - cell_len(sentence)) // 2
    right = room - left - cell_len(sentence)
    rows = []
    for row in range(frame.plot_height):
        line = " " * left + sentence + " " * right if row == (frame.plot_height - 1) // 2 else " " * room
        rows.append([*y_axis(frame, "", styles), Segment(line, styles.axis)])
    return rows


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
        legend += [Segment(swatch, styles.shade_letter(shade)), Segment(shade.words, styles.axis)]
        between -= cell_len(swatch) + cell_len(shade.words)
    start = Segment(" " * frame.axis.gutter + left, styles.axis)
    return [start, *legend, Segment(" " * between + right, styles.axis)]

"""A chart over time as a picture: the data of the screen's strip chart, throttled time shaded."""

from __future__ import annotations

import math
from collections.abc import Iterator

from trainfast_tui.charts.chart_data import ChartData, Limit, ThrottledSpan, worst_last
from trainfast_tui.charts.time_columns import ColumnRanges, extremes, time_columns
from trainfast_tui.charts.y_range import YRange, update_y_range
from trainfast_tui.report.blocks import Picture, Prose
from trainfast_tui.report.sparkline import sparklines
from trainfast_tui.report.svg import (
    BOTTOM,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Axes,
    Scale,
    element,
    label,
    round_ticks,
    tooltip,
    with_legend,
)
from trainfast_tui.text.format import duration
from trainfast_tui.text.shades import shade_of

PICTURE_HEIGHT = 240
COLUMN_WIDTH = 2
"""The width of a column of a line, which keeps its lowest and highest value."""
SERIES_DASHES = ("", "6 3")
"""The two lines of a chart differ by their dashes too."""
TICK_STEPS_S = (0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400)
MAX_TIME_TICKS = 8
MIN_SPAN_WIDTH = 2.0
"""A span shorter than this is drawn this wide."""


def strip_picture(data: ChartData, origin_ns: int) -> Picture | Prose:
    """Return the picture with times since `origin_ns`, or the sentence that says why there is nothing to draw."""
    end_ns = max(data.axis.end_ns, data.axis.start_ns + 1)
    x = Scale((data.axis.start_ns - origin_ns) / 1e9, (end_ns - origin_ns) / 1e9, LEFT, WIDTH - RIGHT)
    count = int((x.end - x.start) / COLUMN_WIDTH)
    column_ns = -(-(end_ns - data.axis.start_ns) // count) or 1
    drawn = [
        time_columns(series.times_ns, series.values, data.axis.start_ns, column_ns, count + 1, data.gap_ns)
        for series in data.series
    ]
    ends = [bounds for columns in drawn if (bounds := extremes(columns)) is not None]
    if not ends:
        return Prose(f"{data.title}: {data.empty}")
    low, high = update_y_range(YRange(), data, ends)
    y = Scale(low, high, PICTURE_HEIGHT - BOTTOM, TOP)
    names = [series.name for series in data.series]
    axes = Axes(
        x,
        y,
        [(second, duration(second)) for second in _time_ticks(x.low, x.high)],
        [(value, data.format_value(value)) for value in round_ticks(low, high, binary=data.binary)],
        "time since the run started",
        names[0] if len(names) == 1 and "/" in names[0] else data.title,
    )
    body = [*(_span(span, data, origin_ns, x) for span in _spans(data)), axes.markup()]
    for columns, series, dashes in zip(drawn, data.series, SERIES_DASHES, strict=False):
        path = "".join(_path(columns, y))
        body.append(
            element("path", tooltip(series.name), d=path, class_=f"line {series.tone}", stroke_dasharray=dashes)
        )
    if data.limit is not None:
        body.append(_limit(data.limit, data, x, y))
    if data.cursor_ns is not None:
        at = x.at((data.cursor_ns - origin_ns) / 1e9)
        body.append(element("line", x1=at, y1=TOP, x2=at, y2=y.start, class_="axis marked"))
        body.append(label("measured from here", at + 4, TOP + 12, "note"))
    markup, legend_height = with_legend("".join(body), _legend(data))
    words = " ".join(_sentences(data, drawn, origin_ns))
    return Picture(data.title, words, markup, WIDTH, PICTURE_HEIGHT + legend_height, sparklines(data, origin_ns))


def _time_ticks(low_s: float, high_s: float) -> list[float]:
    """Return round seconds on an axis, at most `MAX_TIME_TICKS`."""
    step = next(
        (step for step in TICK_STEPS_S if (high_s - low_s) / step <= MAX_TIME_TICKS), (high_s - low_s) / MAX_TIME_TICKS
    )
    first = math.ceil(low_s / step - 1e-9)
    return [multiple * step for multiple in range(first, int(high_s / step + 1e-9) + 1)]


def _path(columns: ColumnRanges, y: Scale) -> Iterator[str]:
    """Yield the line through each column's lowest and highest value; a gap begins a new one."""
    joined = False
    for index, column in enumerate(columns):
        if column is None:
            joined = False
            continue
        at, (lowest, highest) = LEFT + index * COLUMN_WIDTH, column
        yield f"{'L' if joined else 'M'}{at} {y.at(highest):.1f}"
        # A lone value needs a length to be seen.
        yield f"L{at if joined or lowest != highest else at + 1} {y.at(lowest):.1f}"
        joined = True


def _spans(data: ChartData) -> list[ThrottledSpan]:
    """Return the throttled time on the axis, the worst cause last, so that it is drawn on top."""
    return worst_last(
        span for span in data.spans if span.end_ns >= data.axis.start_ns and span.start_ns <= data.axis.end_ns
    )


def _span(span: ThrottledSpan, data: ChartData, origin_ns: int, x: Scale) -> str:
    shade, begin = shade_of(span.cause), x.at((span.start_ns - origin_ns) / 1e9)
    width = max(MIN_SPAN_WIDTH, x.at((span.end_ns - origin_ns) / 1e9) - begin)
    box = element(
        "rect",
        tooltip(f"{shade.words}, {_span_words(span, data, origin_ns)}"),
        x=begin,
        y=TOP,
        width=width,
        height=PICTURE_HEIGHT - BOTTOM - TOP,
        class_=f"shade {shade.tone}",
    )
    return box + label(shade.letter, begin + width / 2, PICTURE_HEIGHT - BOTTOM - 5, "middle")


def _span_words(span: ThrottledSpan, data: ChartData, origin_ns: int) -> str:
    """Return the span's ends in words."""
    end_ns = min(span.end_ns, data.axis.end_ns)
    return f"from {duration((span.start_ns - origin_ns) / 1e9)} to {duration((end_ns - origin_ns) / 1e9)}"


def _limit(limit: Limit, data: ChartData, x: Scale, y: Scale) -> str:
    at = y.at(limit.value)
    line = element("line", x1=x.start, y1=at, x2=x.end, y2=at, class_="line error limit")
    return line + label(f"{limit.label} {data.format_value(limit.value)}", x.end - 4, at - 4, "end note")


def _legend(data: ChartData) -> list[tuple[str, str]]:
    """Return the signs of lines and their names where there are several, and the causes of throttled time."""
    entries = []
    if len(data.series) > 1:
        for series, dashes in zip(data.series, SERIES_DASHES, strict=False):
            line = element("path", d="M0 0H18", class_=f"line {series.tone}", stroke_dasharray=dashes)
            entries.append((line, series.name))
    for cause in dict.fromkeys(span.cause for span in reversed(_spans(data))):
        shade = shade_of(cause)
        box = element("rect", x=0, y=-7, width=18, height=14, class_=f"shade {shade.tone}")
        box += label(shade.letter, 9, 4, "middle")
        entries.append((box, shade.words))
    return entries


def _sentences(data: ChartData, series_ranges: list[ColumnRanges], origin_ns: int) -> Iterator[str]:
    """Yield the picture in words, for readers who cannot see it."""
    for series, columns in zip(data.series, series_ranges, strict=True):
        if (ends := extremes(columns)) is not None:
            yield f"{series.name}: from {data.format_value(ends[0])} to {data.format_value(ends[1])}."
    for span in sorted(_spans(data), key=lambda span: span.start_ns):
        yield f"{shade_of(span.cause).words.capitalize()} {_span_words(span, data, origin_ns)}."

"""The drawing of a report's pictures by matplotlib: charts over time."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

from trainfast_tui.charts.chart_data import ChartData, Series, ThrottledSpan, worst_last
from trainfast_tui.text.event_words import shade_of
from trainfast_tui.text.format import duration, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH_IN, HEIGHT_IN = 7.2, 2.4
"""The size of a picture."""
COLOURS = {
    "muted": "#59636e",
    "primary": "#1d5fbf",
    "secondary": "#8a3fa8",
    "accent": "#0b7285",
    "success": "#2b7a2b",
    "warning": "#9a5b00",
    "error": "#c0232c",
}
TIME_STEPS = (1, 1.5, 2, 3, 6, 10)
"""Round steps of a time axis: 1.5 and 6 suit minutes and hours."""
DATED = ("Date", "Creator", "Format", "Type")
"""Entries of matplotlib's metadata that are left out: a report of the same runs is the same file."""
STYLE = {
    "svg.fonttype": "none",  # text stays text
    "text.parse_math": False,  # a dollar sign in a name is a dollar sign
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}


def can_draw() -> bool:
    """True if matplotlib is installed; the extra `report` brings it."""
    return find_spec("matplotlib") is not None


@dataclass(frozen=True, slots=True)
class Picture:
    """A chart over the time since `origin_ns`; Markdown, and a page without matplotlib, have its description."""

    data: ChartData
    origin_ns: int
    description: str
    """The figures of the picture in sentences."""


def as_svg(picture: Picture) -> str:
    """Return the picture as an SVG file; needs matplotlib, and takes a second at the first call."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    file = io.StringIO()
    with rc_context(STYLE):
        figure = Figure((WIDTH_IN, HEIGHT_IN), layout="constrained")
        _draw_strip(figure.subplots(), picture.data, picture.origin_ns)
        figure.savefig(file, format="svg", transparent=True, metadata=dict.fromkeys(DATED))
    return file.getvalue()


def strip_picture(data: ChartData, origin_ns: int) -> Picture | None:
    """Return a chart over the time since `origin_ns`, None if there is nothing to draw."""
    with_values = [(series.name, values) for series in data.series if (values := _values_on_axis(data, series))]
    if not with_values:
        return None
    format_value = data.format_value
    words = " ".join(
        f"{name}: from {format_value(min(values))} to {format_value(max(values))}." for name, values in with_values
    )
    return Picture(data, origin_ns, words)


def _draw_strip(axes: Axes, data: ChartData, origin_ns: int) -> None:
    from matplotlib.ticker import MaxNLocator, MultipleLocator

    for series, dashes in zip(data.series, ("-", "--"), strict=False):
        times, values = _with_gaps(series, data.gap_ns, origin_ns)
        axes.plot(times, values, dashes, color=COLOURS[series.tone], linewidth=1.2, label=plain(series.name))
    for span in _spans(data):
        begin, end = ((t_ns - origin_ns) / 1e9 for t_ns in (span.start_ns, span.end_ns))
        shade = shade_of(span.cause)
        axes.axvspan(begin, end, facecolor=f"{COLOURS[shade.tone]}38", edgecolor=COLOURS[shade.tone])
        axes.annotate(shade.letter, ((begin + end) / 2, 0.03), xycoords=("data", "axes fraction"), ha="center")
    if (limit := data.limit) is not None:
        axes.axhline(limit.value, color=COLOURS["error"], linestyle="--", linewidth=1)
        words = f"{limit.label} {data.format_value(limit.value)}"
        axes.annotate(words, (0.99, limit.value), xycoords=("axes fraction", "data"), ha="right", va="bottom")
    if data.cursor_ns is not None:
        at_s = (data.cursor_ns - origin_ns) / 1e9
        axes.axvline(at_s, color=COLOURS["muted"], linestyle=":", linewidth=1)
        axes.annotate("measured from here", (at_s, 0.93), (4, 0), ("data", "axes fraction"), "offset points")
    axes.set_xlim(*((t_ns - origin_ns) / 1e9 for t_ns in (data.axis.start_ns, data.axis.end_ns)))
    axes.set_ylim(bottom=data.y_min)
    low, high = axes.get_ylim()
    # Ticks of bytes are multiples of a power of two.
    step = 2.0 ** math.ceil(math.log2(max(high - low, 1e-9) / 5))
    axes.yaxis.set_major_locator(MultipleLocator(step) if data.binary else MaxNLocator(6))
    axes.yaxis.set_major_formatter(lambda value, _: data.format_value(value))
    axes.set_ylabel(plain(data.title if len(data.series) > 1 else data.series[0].name))
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=TIME_STEPS))
    axes.xaxis.set_major_formatter(lambda value, _: duration(value))
    axes.set_xlabel("time since the run started")
    axes.grid(axis="y")
    if len(data.series) > 1:
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, fontsize=8)


def throttled_sentences(data: ChartData, origin_ns: int) -> Iterator[str]:
    """Yield the throttled times of a chart, since `origin_ns`."""
    for span in sorted(_spans(data), key=lambda span: span.start_ns):
        ends_ns = span.start_ns, min(span.end_ns, data.axis.end_ns)
        begin, end = (duration((t_ns - origin_ns) / 1e9) for t_ns in ends_ns)
        yield f"{shade_of(span.cause).words.capitalize()} from {begin} to {end}."


def _values_on_axis(data: ChartData, series: Series) -> list[float]:
    return [
        value
        for t_ns, value in zip(series.times_ns, series.values, strict=True)
        if value is not None and math.isfinite(value) and data.axis.start_ns <= t_ns <= data.axis.end_ns
    ]


def _with_gaps(series: Series, gap_ns: int, origin_ns: int) -> tuple[list[float], list[float]]:
    """Return seconds since the origin and values, NaN where a value is absent or lies further than a gap away."""
    seconds: list[float] = []
    drawn: list[float] = []
    before_ns = None
    for t_ns, value in zip(series.times_ns, series.values, strict=True):
        if before_ns is not None and t_ns - before_ns > gap_ns:
            seconds.append((t_ns - origin_ns) / 1e9)
            drawn.append(math.nan)
        seconds.append((t_ns - origin_ns) / 1e9)
        drawn.append(math.nan if value is None else value)
        before_ns = t_ns
    return seconds, drawn


def _spans(data: ChartData) -> list[ThrottledSpan]:
    """Return the throttled time on the axis, the worst cause last, so that it is drawn on top."""
    start_ns, end_ns = data.axis.start_ns, data.axis.end_ns
    return worst_last(span for span in data.spans if span.end_ns >= start_ns and span.start_ns <= end_ns)

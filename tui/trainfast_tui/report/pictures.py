"""The pictures of a report, drawn by matplotlib: bars of parts, figures with intervals, points, charts over time."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from trainfast_tui.charts.chart_data import (
    ChartData,
    ThrottledSpan,
    YRange,
    extremes,
    time_columns,
    update_y_range,
    worst_last,
)
from trainfast_tui.report.blocks import Picture, Prose
from trainfast_tui.text.event_words import severity_rank, shade_of
from trainfast_tui.text.format import Formatter, duration, number, plain, truncate

if TYPE_CHECKING:
    from matplotlib.axes import Axes


LIGHT_COLOURS = {
    "paper": "#ffffff",
    "ink": "#1b1f24",
    "muted": "#59636e",
    "rule": "#d1d9e0",
    "primary": "#1d5fbf",
    "secondary": "#8a3fa8",
    "accent": "#0b7285",
    "success": "#2b7a2b",
    "warning": "#9a5b00",
    "error": "#c0232c",
}
DARK_COLOURS = {
    "paper": "#14171c",
    "ink": "#e6e9ee",
    "muted": "#9aa4b0",
    "rule": "#3a424c",
    "primary": "#6ea8ff",
    "secondary": "#d79bf0",
    "accent": "#55c7d9",
    "success": "#6fcf6f",
    "warning": "#f0b45a",
    "error": "#ff7b81",
}


def _colours(colours: dict[str, str]) -> str:
    return "".join(f"--{name}:{value};" for name, value in colours.items())


COLOUR_RULES = (
    f":root{{{_colours(LIGHT_COLOURS)}}}@media (prefers-color-scheme:dark){{:root{{{_colours(DARK_COLOURS)}}}}}"
)
"""The colours by name, of the page and of each picture in it."""
STYLE_SHEET = "\n".join(
    [
        ":root{color-scheme:light dark}",
        COLOUR_RULES,
        "body{max-width:62rem;margin:2rem auto;padding:0 1rem;background:var(--paper);color:var(--ink);"
        "font:16px/1.5 system-ui,sans-serif}",
        "h1{font-size:1.6rem}h2{font-size:1.25rem;margin-top:2.2rem;border-bottom:1px solid var(--rule)}"
        "h3{font-size:1.05rem}",
        ".wide{overflow-x:auto;margin:1rem 0}table{border-collapse:collapse;font-size:.9rem}",
        "th,td{text-align:left;vertical-align:top;padding:.3rem .7rem;border-bottom:1px solid var(--rule)}"
        "th{color:var(--muted);font-weight:600}.figure{text-align:right;font-variant-numeric:tabular-nums}"
        "td.figure{white-space:nowrap}",
        "figure{margin:1.2rem 0}figcaption{font-weight:600}img{width:100%;height:auto}",
        "details{margin:.6rem 0}summary{cursor:pointer}pre{overflow-x:auto;padding:.8rem;border:1px solid var(--rule)}",
    ]
)


WIDTH_IN, ROW_IN, MARGIN_IN, SCATTER_IN, STRIP_IN = 7.2, 0.32, 1.0, 3.4, 2.4
"""The width of a picture, the height of a row of bars, the height around rows, and the heights of other pictures."""
HATCHES = ("", "///", "xxx", "\\\\\\", "+++", "---")
"""Fills of the parts of a bar: no part is known by its colour alone."""
LABEL_LETTERS = 29
TIME_STEPS = (1, 1.5, 2, 3, 6, 10)
"""Round steps of a time axis: 1.5 and 6 suit minutes and hours."""
DATED = ("Date", "Creator", "Format", "Type")
"""Entries of matplotlib's metadata that are left out: a report of the same runs is the same file."""
STYLE = {
    "svg.fonttype": "none",  # text stays text
    "text.parse_math": False,  # a dollar sign in a name is a dollar sign
    "font.size": 9,
    "text.color": LIGHT_COLOURS["ink"],
    "axes.labelcolor": LIGHT_COLOURS["ink"],
    "axes.edgecolor": LIGHT_COLOURS["muted"],
    "xtick.color": LIGHT_COLOURS["muted"],
    "ytick.color": LIGHT_COLOURS["muted"],
    "grid.color": LIGHT_COLOURS["rule"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "hatch.linewidth": 0.6,
}


@dataclass(frozen=True, slots=True)
class StackedPart:
    """A part of a bar."""

    name: str
    value: float
    tone: str
    """The same in every bar for one name."""


@dataclass(frozen=True, slots=True)
class StackedBar:
    """A bar of parts."""

    label: str
    parts: tuple[StackedPart, ...]
    """Some of them may be zero."""
    words: str
    """The words at the end of the bar."""


@dataclass(frozen=True, slots=True)
class Whisker:
    """A figure with its interval; both ends are the figure itself without one."""

    label: str
    low: float
    middle: float
    high: float
    words: str
    tone: str = "primary"


@dataclass(frozen=True, slots=True)
class PointKind:
    """A kind of points."""

    words: str
    """The meaning of a point of this kind."""
    marker: str
    """Matplotlib's marker: points of one kind have one."""
    tone: str
    is_open: bool = False


ON_FRONT = PointKind("on the front", "o", "primary")
BEHIND_FRONT = PointKind("behind the front", "o", "muted", is_open=True)


@dataclass(frozen=True, slots=True)
class PicturePoint:
    """A point of two figures."""

    x: float
    y: float
    kind: PointKind
    words: str
    """Name the point in the description."""


@dataclass(frozen=True, slots=True)
class ScatterLine:
    """A line through points, or a limit along an axis."""

    points: tuple[tuple[float, float], ...]
    words: str
    """The words of the legend."""
    tone: str
    dashes: str = "-"
    """Matplotlib's line style."""


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis from zero."""

    title: str
    """The title with the unit."""
    format_value: Formatter = number
    """Formats the ticks."""
    binary: bool = False
    """Put the ticks at multiples of a power of two, for bytes."""


def can_draw() -> bool:
    """True if matplotlib is installed; the extra `report` brings it."""
    return find_spec("matplotlib") is not None


def stacked_picture(
    title: str, x_title: str, bars: Sequence[StackedBar], format_value: Formatter, *, binary: bool = False
) -> Picture | None:
    """Return bars from zero to the sum of their parts as one picture; None if every bar is empty."""
    if not any(part.value for bar in bars for part in bar.parts):
        return None
    names = list(dict.fromkeys(part.name for bar in bars for part in bar.parts))
    used = {part.name for bar in bars for part in bar.parts if part.value}

    def draw(axes: Axes) -> None:
        for row, bar in enumerate(bars):
            begin = 0.0
            for part in bar.parts:
                tone, hatch = LIGHT_COLOURS[part.tone], HATCHES[names.index(part.name) % len(HATCHES)]
                legend_name = part.name if part.name in unnamed else None
                if part.value:
                    axes.barh(
                        *(row, part.value, 0.65), left=begin, color=f"{tone}66", edgecolor=tone, hatch=hatch,
                        label=legend_name,
                    )  # fmt: skip
                    unnamed.discard(part.name)
                begin += part.value
            axes.annotate(plain(bar.words), (begin, row), (6, 0), textcoords="offset points", va="center")
        _label_rows(axes, [bar.label for bar in bars])
        axes.set_xlim(0, 1.25 * max(sum(part.value for part in bar.parts) for bar in bars))
        _set_x_axis(axes, Axis(x_title, format_value, binary))
        _add_legend(axes)

    unnamed = set(used)
    words = " ".join(
        f"{bar.label}: {bar.words} ("
        + ", ".join(f"{part.name} {format_value(part.value)}" for part in bar.parts if part.value)
        + ")."
        for bar in bars
    )
    return Picture(title, words, lambda: _svg(MARGIN_IN + ROW_IN * len(bars), draw))


def whisker_picture(title: str, x_title: str, whiskers: Sequence[Whisker], format_value: Formatter) -> Picture | None:
    """Return a dot and an interval for each figure, on an axis that shows zero; None without any figure."""
    if not whiskers:
        return None

    def draw(axes: Axes) -> None:
        for row, one in enumerate(whiskers):
            ends = [[max(0.0, one.middle - one.low)], [max(0.0, one.high - one.middle)]]
            axes.errorbar(one.middle, row, xerr=ends, fmt="o", capsize=4, color=LIGHT_COLOURS[one.tone])
            axes.annotate(plain(one.words), (one.high, row), (8, 0), textcoords="offset points", va="center")
        axes.axvline(0, color=LIGHT_COLOURS["muted"], linewidth=0.8)
        _label_rows(axes, [one.label for one in whiskers])
        low, high = min(0.0, *(one.low for one in whiskers)), max(0.0, *(one.high for one in whiskers))
        axes.set_xlim(1.05 * low, (1.25 * high) or None)
        _set_x_axis(axes, Axis(x_title, format_value))

    words = " ".join(f"{whisker.label}: {whisker.words}." for whisker in whiskers)
    return Picture(title, words, lambda: _svg(MARGIN_IN + ROW_IN * len(whiskers), draw))


def scatter_picture(
    title: str, points: Sequence[PicturePoint], lines: Sequence[ScatterLine], x_axis: Axis, y_axis: Axis
) -> Picture | None:
    """Return points of each kind, with lines through or beside them; None without a point."""
    if not points:
        return None

    def draw(axes: Axes) -> None:
        for line in lines:
            xs, ys = zip(*line.points, strict=True)
            axes.plot(xs, ys, line.dashes, color=LIGHT_COLOURS[line.tone], label=plain(line.words))
        for kind in dict.fromkeys(point.kind for point in points):
            tone = LIGHT_COLOURS[kind.tone]
            of_kind = [(point.x, point.y) for point in points if point.kind == kind]
            fill = "none" if kind.is_open else tone
            marks: dict[str, Any] = {"marker": kind.marker, "markerfacecolor": fill, "color": tone, "label": kind.words}
            axes.plot(*zip(*of_kind, strict=True), linestyle="none", **marks)
        axes.set_xlim(0, 1.05 * max(*axes.get_xlim(), 1e-9))
        axes.set_ylim(0, 1.05 * max(*axes.get_ylim(), 1e-9))
        _set_x_axis(axes, x_axis)
        _set_ticks(axes.yaxis, y_axis)
        axes.set_ylabel(y_axis.title)
        axes.grid(axis="y")
        _add_legend(axes)

    return Picture(title, " ".join(f"{point.words}." for point in points), lambda: _svg(SCATTER_IN, draw))


def strip_picture(data: ChartData, origin_ns: int) -> Picture | Prose:
    """Return the picture with times since `origin_ns`, or the sentence that says why there is nothing to draw."""
    ends = [(min(values), max(values)) for series in data.series if (values := list(_values_on_axis(data, series)))]
    if not ends:
        return Prose(f"{data.title}: {data.empty}")

    def draw(axes: Axes) -> None:
        for series, dashes in zip(data.series, ("-", "--"), strict=False):
            times, values = _with_gaps(series.times_ns, series.values, data.gap_ns, origin_ns)
            axes.plot(times, values, dashes, color=LIGHT_COLOURS[series.tone], linewidth=1.2, label=plain(series.name))
        for span in _spans(data):
            begin, end = ((t_ns - origin_ns) / 1e9 for t_ns in (span.start_ns, span.end_ns))
            shade = shade_of(span.cause)
            axes.axvspan(begin, end, facecolor=f"{LIGHT_COLOURS[shade.tone]}38", edgecolor=LIGHT_COLOURS[shade.tone])
            axes.annotate(shade.letter, ((begin + end) / 2, 0.03), xycoords=("data", "axes fraction"), ha="center")
        if data.limit is not None:
            axes.axhline(data.limit.value, color=LIGHT_COLOURS["error"], linestyle="--", linewidth=1)
            words = f"{data.limit.label} {data.format_value(data.limit.value)}"
            axes.annotate(words, (0.99, data.limit.value), xycoords=("axes fraction", "data"), ha="right", va="bottom")
        if data.cursor_ns is not None:
            at = (data.cursor_ns - origin_ns) / 1e9
            axes.axvline(at, color=LIGHT_COLOURS["muted"], linestyle=":", linewidth=1)
            axes.annotate("measured from here", (at, 0.93), (4, 0), ("data", "axes fraction"), "offset points")
        axes.set_ylim(*update_y_range(YRange(), data, ends))
        axes.set_xlim(*((t_ns - origin_ns) / 1e9 for t_ns in (data.axis.start_ns, data.axis.end_ns)))
        _set_ticks(axes.yaxis, Axis(data.title, data.format_value, data.binary))
        axes.set_ylabel(plain(data.title if len(data.series) > 1 else data.series[0].name))
        axes.xaxis.set_major_locator(_locator(steps=TIME_STEPS))
        axes.xaxis.set_major_formatter(lambda value, _: duration(value))
        axes.set_xlabel("time since the run started")
        axes.grid(axis="y")
        if len(data.series) > 1:
            _add_legend(axes)

    words = " ".join(_sentences(data, ends, origin_ns))
    return Picture(data.title, words, lambda: _svg(STRIP_IN, draw), sparklines(data, origin_ns))


def _values_on_axis(data: ChartData, series: Any) -> Iterator[float]:
    for t_ns, value in zip(series.times_ns, series.values, strict=True):
        if value is not None and math.isfinite(value) and data.axis.start_ns <= t_ns <= data.axis.end_ns:
            yield value


def _with_gaps(
    times_ns: Sequence[int], values: Sequence[float | None], gap_ns: int, origin_ns: int
) -> tuple[list[float], list[float]]:
    """Return seconds since the origin and values, NaN where a value is absent or lies further than a gap away."""
    seconds: list[float] = []
    drawn: list[float] = []
    for index, (t_ns, value) in enumerate(zip(times_ns, values, strict=True)):
        if index and t_ns - times_ns[index - 1] > gap_ns:
            seconds.append((t_ns - origin_ns) / 1e9)
            drawn.append(math.nan)
        seconds.append((t_ns - origin_ns) / 1e9)
        drawn.append(math.nan if value is None else value)
    return seconds, drawn


def _spans(data: ChartData) -> list[ThrottledSpan]:
    """Return the throttled time on the axis, the worst cause last, so that it is drawn on top."""
    return worst_last(
        span for span in data.spans if span.end_ns >= data.axis.start_ns and span.start_ns <= data.axis.end_ns
    )


def _sentences(data: ChartData, ends: Sequence[tuple[float, float]], origin_ns: int) -> Iterator[str]:
    """Yield the picture in words, for readers who cannot see it."""
    with_values = [series for series in data.series if any(True for _ in _values_on_axis(data, series))]
    for series, (low, high) in zip(with_values, ends, strict=True):
        yield f"{series.name}: from {data.format_value(low)} to {data.format_value(high)}."
    for span in sorted(_spans(data), key=lambda span: span.start_ns):
        begin, end = (
            duration((t_ns - origin_ns) / 1e9) for t_ns in (span.start_ns, min(span.end_ns, data.axis.end_ns))
        )
        yield f"{shade_of(span.cause).words.capitalize()} from {begin} to {end}."


def _label_rows(axes: Axes, labels: Sequence[str]) -> None:
    axes.set_yticks(range(len(labels)), [truncate(plain(text), LABEL_LETTERS) for text in labels])
    axes.set_ylim(len(labels) - 0.4, -0.6)


def _set_x_axis(axes: Axes, axis: Axis) -> None:
    _set_ticks(axes.xaxis, axis)
    axes.set_xlabel(axis.title)


def _set_ticks(which: Any, axis: Axis) -> None:
    """Put round ticks on matplotlib's x or y axis; of bytes they are multiples of a power of two."""
    from matplotlib.ticker import MultipleLocator

    low, high = which.get_view_interval()
    step = 2.0 ** math.ceil(math.log2(max(high - low, 1e-9) / 5))
    which.set_major_locator(MultipleLocator(step) if axis.binary else _locator())
    which.set_major_formatter(lambda value, _: axis.format_value(value))


def _locator(steps: Sequence[float] | None = None) -> Any:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(6, steps=steps)


def _add_legend(axes: Axes) -> None:
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, fontsize=8)


def _svg(height_in: float, draw: Callable[[Axes], None]) -> str:
    """Draw on one pair of axes, and return an SVG file in the colours of the page, light or dark."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    file = io.StringIO()
    with rc_context(STYLE):
        figure = Figure((WIDTH_IN, height_in), layout="constrained")
        draw(figure.subplots())
        figure.savefig(file, format="svg", transparent=True, metadata=dict.fromkeys(DATED))
    svg = file.getvalue()
    for name, colour in LIGHT_COLOURS.items():
        svg = svg.replace(colour, f"var(--{name})")
    theme = f"{COLOUR_RULES}text{{font-family:sans-serif!important}}"
    return svg.replace('<style type="text/css">', f'<style type="text/css">{theme}', 1)


SPARKLINE_COLUMNS = 64
BLOCK_GLYPHS = "▁▂▃▄▅▆▇█"


def sparklines(data: ChartData, origin_ns: int) -> tuple[str, ...]:
    """Return a line for each series with values, its ends in the unit, then throttled time and the time axis."""
    # One more than the quotient, so that a sample at the end falls in the last column.
    column_ns = (data.axis.end_ns - data.axis.start_ns) // SPARKLINE_COLUMNS + 1
    names = [series.name for series in data.series]
    name_width = max(map(len, [*names, "throttled"]))
    lines = []
    for series in data.series:
        columns = time_columns(
            series.times_ns, series.values, data.axis.start_ns, column_ns, SPARKLINE_COLUMNS, data.gap_ns
        )
        ends = extremes(columns)
        if ends is None:
            continue
        # The middle of a column, so that a spike does not stand for all of its time.
        drawn = "".join(
            " " if column is None else _block((column[0] + column[1]) / 2, ends, data.y_min) for column in columns
        )
        range_words = " to ".join(map(data.format_value, ends))
        lines.append(f"{series.name.ljust(name_width)}  {drawn}  {range_words}")
    causes = sorted({span.cause for span in data.spans}, key=lambda cause: severity_rank(shade_of(cause)))
    if causes:
        words = ", ".join(f"{shade_of(cause).letter} {shade_of(cause).words}" for cause in causes)
        lines.append(f"{'throttled'.ljust(name_width)}  {_letters(data, column_ns)}  {words}")
    begin, end = (duration((t_ns - origin_ns) / 1e9) for t_ns in (data.axis.start_ns, data.axis.end_ns))
    lines.append(f"{'time'.ljust(name_width)}  {begin}{end.rjust(SPARKLINE_COLUMNS - len(begin))}")
    if data.cursor_ns is not None:
        measured_from = duration((data.cursor_ns - origin_ns) / 1e9)
        lines.append(f"{''.ljust(name_width)}  measured from {measured_from}")
    return tuple(lines)


def _block(value: float, ends: tuple[float, float], y_min: float | None) -> str:
    """Return the block of a value between zero, or the lowest value, and the highest."""
    low = ends[0] if y_min is None else min(y_min, ends[0])
    share = (value - low) / (ends[1] - low) if ends[1] > low else 0.0
    return BLOCK_GLYPHS[min(len(BLOCK_GLYPHS) - 1, int(share * len(BLOCK_GLYPHS)))]


def _letters(data: ChartData, column_ns: int) -> str:
    letters = [" "] * SPARKLINE_COLUMNS
    for span in worst_last(data.spans):
        first = max(0, (span.start_ns - data.axis.start_ns) // column_ns)
        last = min(SPARKLINE_COLUMNS - 1, (span.end_ns - data.axis.start_ns) // column_ns)
        for column in range(first, last + 1):
            letters[column] = shade_of(span.cause).letter
    return "".join(letters)

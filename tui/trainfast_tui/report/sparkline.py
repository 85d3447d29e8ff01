"""A chart over time as lines of text: block characters, and a letter under each column of throttled time."""

from __future__ import annotations

from trainfast_tui.charts.chart_data import ChartData, worst_last
from trainfast_tui.charts.time_columns import extremes, time_columns
from trainfast_tui.text.format import duration
from trainfast_tui.text.shades import severity_rank, shade_of

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

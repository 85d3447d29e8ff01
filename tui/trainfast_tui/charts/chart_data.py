"""The data of a chart: series over time, throttled time and a limit."""

from collections.abc import Iterable, Sequence

import msgspec

from trainfast_tui.charts.time_axis import TimeAxis
from trainfast_tui.text.format import Formatter, number
from trainfast_tui.text.lines import Tone
from trainfast_tui.text.shades import severity_rank, shade_of


class Series(msgspec.Struct, frozen=True):
    """One line of a chart; the first is drawn solid and in front, the second dotted."""

    name: str
    times_ns: Sequence[int]
    """Ascending, on the clock of the chart's axis; it is sliced and bisected."""
    values: Sequence[float | None]
    """One value for each time; None, NaN and infinities are absent readings."""
    tone: Tone = "primary"
    median: float | None = None
    """The median that stands elsewhere on the screen, named beside the newest value; None without one."""


class ThrottledSpan(msgspec.Struct, frozen=True):
    """A span of throttled time, drawn shaded and marked by the first letter of its cause."""

    start_ns: int
    end_ns: int
    cause: str
    """Such as `thermal` (T) or `power` (P)."""


def worst_last(spans: Iterable[ThrottledSpan]) -> list[ThrottledSpan]:
    """Return the spans in the order of drawing: where two overlap the worse one covers the other."""
    return sorted(spans, key=lambda span: -severity_rank(shade_of(span.cause)))


class Limit(msgspec.Struct, frozen=True):
    """A horizontal line at `value`, in the unit of the series; the y range reaches up to it."""

    value: float
    label: str


class ChartData(msgspec.Struct, frozen=True):
    """Everything that one frame of a chart shows."""

    title: str
    series: tuple[Series, ...]
    axis: TimeAxis
    gap_ns: int
    """Samples further apart than this are not joined."""
    y_range_key: str = ""
    """The y range is kept between frames of the same key (such as a run id and a unit), title and ends."""
    format_value: Formatter = number
    """Formats the y labels and the newest value in the title row."""
    spans: tuple[ThrottledSpan, ...] = ()
    limit: Limit | None = None
    y_min: float | None = 0.0
    """The lower end of the y axis while the data stays above; None follows the data."""
    y_max: float | None = None
    """The upper end of the y axis while the data stays below; None follows the data."""
    binary: bool = False
    """Round the ends of the y axis to powers of two, for bytes."""
    empty: str = "No samples yet."
    """The sentence shown while no series has a value on the axis."""
    cursor_ns: int | None = None
    """A moment to mark with a vertical line."""

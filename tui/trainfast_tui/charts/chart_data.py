"""The data of a chart: series over time, throttled time and a limit."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

import msgspec

from trainfast_tui.live.snapshot import Snapshot
from trainfast_tui.text.event_words import severity_rank, shade_of
from trainfast_tui.text.format import Formatter, Tone, number

if TYPE_CHECKING:
    from trainfast_runner.records.tick import Tick


SECOND_NS = 1_000_000_000
WINDOWS_S = (30, 60, 120, 300, 600, 1800)
"""The lengths of time that the charts can show; a `window` is an index into them."""
DEFAULT_WINDOW = 2
TICK_GAP_NS = 5 * SECOND_NS
"""Samples of the machine further apart than this are not joined, unless they all lie far apart (`gap_ns_of`)."""


class TimeAxis(msgspec.Struct, frozen=True):
    """The ends of the axis in CLOCK_MONOTONIC."""

    start_ns: int
    end_ns: int
    is_live: bool
    """True if the axis ends now, and not at the end of a run."""


def time_axis(snapshot: Snapshot, window: int) -> TimeAxis:
    """Return the last `WINDOWS_S[window]` seconds, up to now or to the end of an ended run."""
    run = snapshot.run
    if run is None or run.is_live:
        length_s = WINDOWS_S[window]
        if run is not None and run.run_file is not None:
            # A young run fills the chart; the axis grows in few steps, since each redraws everything.
            age_s = (snapshot.taken_ns - run.run_file.clock.monotonic_ns) / 1e9
            length_s = next((shorter for shorter in WINDOWS_S[:window] if shorter >= age_s > 0), length_s)
        return TimeAxis(snapshot.taken_ns - length_s * SECOND_NS, snapshot.taken_ns, is_live=True)
    length_ns = WINDOWS_S[window] * SECOND_NS
    last_event_ns = run.events[-1].t_ns if run.events else 0
    end_ns = max((series[-1].t_ns for series in (run.ticks, run.steps) if series), default=last_event_ns)
    # The last event is the end, unless the end was found out later.
    if last_event_ns - end_ns < TICK_GAP_NS:
        end_ns = max(end_ns, last_event_ns)
    first_ns = min([series[0].t_ns for series in (run.ticks, run.steps) if series], default=end_ns - length_ns)
    # A short run fills the chart; of a long one the end is shown.
    start_ns = max(end_ns - length_ns, min(first_ns, end_ns - 10 * SECOND_NS))
    return TimeAxis(start_ns, end_ns, is_live=False)


def ticks_on(axis: TimeAxis, ticks: Sequence[Tick]) -> Sequence[Tick]:
    """Return the ticks on the axis, and those of the `TICK_GAP_NS` before it."""
    return ticks[bisect_left(ticks, axis.start_ns - TICK_GAP_NS, key=lambda tick: tick.t_ns) :]


class CellAxis(msgspec.Struct, frozen=True):
    """The time of each cell, for all widgets of one width."""

    gutter: int
    """Cells left of the axis; 0 if there is no room for it."""
    count: int
    start_ns: int
    cell_ns: int

    def cell_of(self, t_ns: int) -> int:
        """Return the cell of a moment; outside 0 to `count` - 1 it is not on the axis."""
        return (t_ns - self.start_ns) // self.cell_ns


GUTTER, MIN_PLOT_CELLS = 11, 10
"""Cells left of the time axis for y labels, and the least of a plot beside them."""


def cell_axis(width: int, axis: TimeAxis) -> CellAxis:
    """Return the axis in the cells of a chart `width` cells wide."""
    gutter = GUTTER if width >= GUTTER + MIN_PLOT_CELLS else 0
    count = max(1, width - gutter)
    column_ns = max(1, -(-(axis.end_ns - axis.start_ns) // (count << X_BITS)))
    # Whole cells of absolute time: the picture then moves by characters and not by dots.
    cell_ns = column_ns << X_BITS
    return CellAxis(gutter, count, (axis.end_ns // cell_ns - count + 1) * cell_ns, cell_ns)


def gap_ns_of(times_ns: Sequence[int], least_ns: int = TICK_GAP_NS) -> int:
    """Return the distance of samples from which on they are not joined, at least `least_ns`.

    Thinned records and those of a slow sampler lie further apart than others.
    """
    distances_ns = [after - before for before, after in pairwise(times_ns)]
    return max(least_ns, int(4 * median(distances_ns))) if distances_ns else least_ns


class Series(msgspec.Struct, frozen=True):
    """One line of a chart; the first is drawn solid and in front, the second dotted."""

    name: str
    times_ns: Sequence[int]
    """Ascending, on the clock of the chart's axis; it is sliced and bisected."""
    values: Sequence[float | None]
    """One value for each time; None, NaN and infinities are absent readings."""
    tone: Tone = "primary"


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


ColumnRanges = list[tuple[float, float] | None]
"""The lowest and highest value of each dot column, oldest first; None is a gap."""


def time_columns(
    times_ns: Sequence[int], values: Sequence[float | None], start_ns: int, column_ns: int, count: int, gap_ns: int
) -> ColumnRanges:
    """Return the extremes of `values` in each of `count` columns of `column_ns` from `start_ns` on.

    Columns between two neighbouring samples hold the straight line between them, unless a value between them
    is absent (None, NaN or infinite) or they lie more than `gap_ns` apart. `times_ns` must ascend.
    """
    columns: ColumnRanges = [None] * count
    end_ns = start_ns + count * column_ns
    # The sample before the window begins the line that enters it.
    first = max(0, bisect_left(times_ns, start_ns) - 1)
    last = bisect_left(times_ns, end_ns)
    isfinite = math.isfinite
    previous_column, previous_ns, previous_value = 0, 0, math.nan
    connected = False
    for time_ns, value in zip(times_ns[first:last], values[first:last], strict=False):
        if value is None or not isfinite(value):
            connected = False
            continue
        column = (time_ns - start_ns) // column_ns
        if column >= 0:
            bounds = columns[column]
            if bounds is None:
                columns[column] = (value, value)
            elif value < bounds[0]:
                columns[column] = (value, bounds[1])
            elif value > bounds[1]:
                columns[column] = (bounds[0], value)
        if connected and column > previous_column + 1 and time_ns - previous_ns <= gap_ns:
            slope = (value - previous_value) / (column - previous_column)
            for between in range(max(previous_column + 1, 0), column):
                level = previous_value + slope * (between - previous_column)
                columns[between] = (level, level)
        previous_column, previous_ns, previous_value = column, time_ns, value
        connected = True
    return columns


LIMIT_HEADROOM = 1.06
"""End of an axis over the limit, so that a point above the limit shows."""
SHRINK_AFTER_NS = 20_000_000_000
"""Chosen, not measured: time of the data after which a range that is too large shrinks."""
_DECIMAL_STEPS = (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0)
_BINARY_STEPS = (1.0, 1.25, 1.5, 1.75, 2.0)
_MAX_VALUE = 1e300
"""Values are clamped to this, so that no length of a range is infinite."""


def nice_ceiling(value: float, *, binary: bool = False) -> float:
    """Return the least round number of at least `value` (> 0): a short decimal, or a short multiple of 2**n."""
    base = 2.0 if binary else 10.0
    unit = base ** math.floor(math.log(value, base))
    for step in _BINARY_STEPS if binary else _DECIMAL_STEPS:
        # Rounding may put a round value a hair above its own step.
        if step * unit >= value * (1 - 1e-12):
            return step * unit
    return base * unit


class YRange:
    """The range of a chart's y axis, in the data's unit; it grows at once and shrinks late.

    The range shrinks only after the data needed at most half of it for `SHRINK_AFTER_NS` of the data's own time: the
    picture keeps its scale while values move.
    """

    _range: tuple[float, float] | None = None
    _roomy_since_ns: int | None = None

    def fit(
        self,
        low: float,
        high: float,
        now_ns: int,
        *,
        y_min: float | None = 0.0,
        y_max: float | None = None,
        binary: bool = False,
    ) -> tuple[float, float]:
        """Return the range to draw data from `low` to `high` with, at the data's time `now_ns`.

        `y_min` and `y_max` are the ends of the range while the data stays inside; None follows the data.
        """
        low, high = max(-_MAX_VALUE, min(low, _MAX_VALUE)), max(-_MAX_VALUE, min(high, _MAX_VALUE))
        fitting = _round_range(low, high, y_min, y_max, binary)
        current = self._range or fitting
        if low < current[0] or high > current[1]:
            current = min(fitting[0], current[0]), max(fitting[1], current[1])
        if fitting[1] - fitting[0] > 0.5 * (current[1] - current[0]):
            self._roomy_since_ns = None
        elif self._roomy_since_ns is None:
            self._roomy_since_ns = now_ns
        elif now_ns - self._roomy_since_ns >= SHRINK_AFTER_NS:
            current, self._roomy_since_ns = fitting, None
        self._range = current
        return current


def _round_range(
    low: float, high: float, y_min: float | None, y_max: float | None, binary: bool
) -> tuple[float, float]:
    """Return a range with round ends that holds the data and both fixed ends."""
    bottom = low if y_min is None else min(low, y_min)
    top = high if y_max is None else max(high, y_max)
    # A flat line needs a span, and one below the resolution of a float would divide by zero.
    span = top - bottom
    if span <= max(abs(top), abs(bottom)) * 1e-9 or span < 1e-250:
        span = abs(top) * 0.1 if abs(top) > 1e-200 else 1.0
    step = nice_ceiling(span, binary=binary)
    if top != y_max and bottom == y_min:
        return bottom, bottom + step
    grid = step / 8 if binary else step / 10
    bottom = bottom if bottom == y_min else math.floor(bottom / grid) * grid
    top = top if top == y_max else math.ceil(top / grid) * grid
    return bottom, top if top > bottom else bottom + step


X_BITS, Y_BITS = 1, 2
"""A cell is `2**X_BITS` dots wide and `2**Y_BITS` high."""
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""The bit of each dot of the left and of the right column (Unicode 16.0, chapter 21.1)."""
_MASKS = tuple(
    tuple(tuple(sum(column[top : bottom + 1]) for bottom in range(4)) for top in range(4)) for column in _DOTS
)
"""`_MASKS[x][top][bottom]`: the dots of column x of a cell from row `top` to row `bottom`."""
GLYPHS = (" ", *(chr(0x2800 + mask) for mask in range(1, 256)))
"""The character of every mask of dots."""


def draw(
    cells: bytearray,
    width: int,
    height: int,
    columns: ColumnRanges,
    y_range: tuple[float, float],
    *,
    first: int = 0,
    stride: int = 1,
) -> None:
    """Set the dots of one series in `cells` (row-major, `width` x `height` cells).

    Column i goes to dot column `first + i * stride`. Neighbouring columns are joined by a vertical line when
    `stride` is 1; a larger stride leaves a dotted line, so that two series differ without colour.
    Values outside `y_range` go to its edge.
    """
    low, high = y_range
    bottom_dot = (height << Y_BITS) - 1
    scale = bottom_dot / (high - low)
    x_mask, y_mask = (1 << X_BITS) - 1, (1 << Y_BITS) - 1
    x_bits, y_bits, masks = X_BITS, Y_BITS, _MASKS
    dot_width = width << x_bits
    before_top = before_bottom = -1
    for index, column in enumerate(columns):
        x = first + index * stride
        if column is None or not 0 <= x < dot_width:
            before_top = -1
            continue
        lowest, highest = column
        # Comparisons, not min() and max(): this loop is most of a chart's cost.
        dot = (highest - low) * scale + 0.5
        # NaN, which infinity makes in a chart of a single dot, goes to the bottom.
        top = bottom_dot - (int(dot) if 0 <= dot <= bottom_dot else bottom_dot if dot > bottom_dot else 0)
        bottom = top
        if lowest != highest:
            dot = (lowest - low) * scale + 0.5
            bottom = bottom_dot - (int(dot) if 0 <= dot <= bottom_dot else bottom_dot if dot > bottom_dot else 0)
        drawn_top, drawn_bottom = top, bottom
        if before_top >= 0 and stride == 1:
            if before_top - 1 > bottom:
                drawn_bottom = before_top - 1
            if before_bottom + 1 < top:
                drawn_top = before_bottom + 1
        before_top, before_bottom = top, bottom
        by_row = masks[x & x_mask]
        cell_top, cell_bottom = drawn_top >> y_bits, drawn_bottom >> y_bits
        cell = cell_top * width + (x >> x_bits)
        if cell_top == cell_bottom:
            cells[cell] |= by_row[drawn_top & y_mask][drawn_bottom & y_mask]
            continue
        cells[cell] |= by_row[drawn_top & y_mask][y_mask]
        for _ in range(cell_top + 1, cell_bottom):
            cell += width
            cells[cell] |= by_row[0][y_mask]
        cells[cell + width] |= by_row[0][drawn_bottom & y_mask]

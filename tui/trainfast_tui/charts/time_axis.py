"""The time axis that all charts of one frame share: its ends in ns, and for charts of one width in cells."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

import msgspec

from trainfast_tui.charts.braille import X_BITS
from trainfast_tui.live.snapshot import Snapshot

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

    @property
    def end_label(self) -> str:
        """The label of the right end."""
        return "now" if self.is_live else "end"


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
    """The time of each cell, for all widgets of one width and gutter."""

    gutter: int
    """Cells left of the axis; 0 if there is no room for it."""
    count: int
    start_ns: int
    cell_ns: int

    def cell_of(self, t_ns: int) -> int:
        """Return the cell of a moment; outside 0 to `count` - 1 it is not on the axis."""
        return (t_ns - self.start_ns) // self.cell_ns


def cell_axis(width: int, gutter: int, axis: TimeAxis) -> CellAxis:
    """Return the axis in the cells of a chart `width` cells wide."""
    gutter = gutter if width >= gutter + 10 else 0
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

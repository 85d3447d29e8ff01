"""The chart of throughput by step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, get_args

from trainfast_tui.charts.chart_data import ChartData, Series
from trainfast_tui.charts.tick_values import TickValuesCache, throttled_spans
from trainfast_tui.charts.time_axis import SECOND_NS, TimeAxis, gap_ns_of, ticks_on
from trainfast_tui.live.figures import run_figures
from trainfast_tui.live.recent_conditions import RECENT_STEPS
from trainfast_tui.live.snapshot import Snapshot
from trainfast_tui.text import format as fmt
from trainfast_tui.text.keys import RUN_KEY, key_of
from trainfast_tui.text.signs import SYNTHETIC_MARK
from trainfast_tui.text.wait_words import start_words

if TYPE_CHECKING:
    from trainfast_runner.running.follower import RunSnapshot

MIN_STEP_GAP_NS = 5 * SECOND_NS
NO_SAMPLES = "The script shows no samples: start it with --samples-per-step N."
ThroughputUnit = Literal["samples", "tokens"]
THROUGHPUT_UNITS: tuple[ThroughputUnit, ...] = get_args(ThroughputUnit)
"""The units of work that throughput counts, in the order in which a key shows them."""


def next_throughput_unit(unit: ThroughputUnit) -> ThroughputUnit:
    """Return the unit after this one; after the last comes the first."""
    return THROUGHPUT_UNITS[(THROUGHPUT_UNITS.index(unit) + 1) % len(THROUGHPUT_UNITS)]


def throughput_chart(
    snapshot: Snapshot,
    axis: TimeAxis,
    unit: ThroughputUnit,
    uuids: Sequence[str] = (),
    cache: TickValuesCache | None = None,
) -> ChartData:
    """Return the chart of throughput by step, in samples/s or tokens/s, as `unit` says.

    Time in which one of the GPUs `uuids` was throttled, or any GPU if there are none, is shaded.
    """
    run = snapshot.run
    rates = run.rates if run is not None else None
    values: Sequence[float | None] = ()
    empty = _waiting_words(run)
    if rates is not None:
        values = rates.samples_per_s if unit == "samples" else rates.tokens_per_s
        if values and all(value is None for value in values):
            key = key_of("main", "ChartColumn.throughput_unit")
            values, empty = (), f"This model has no {unit}; {key} shows {next_throughput_unit(unit)}/s."
    figures = run_figures(run) if run is not None and values else None
    median = None if figures is None else figures.samples_per_s if unit == "samples" else figures.tokens_per_s
    times_ns = rates.times_ns if rates is not None and values else ()
    synthetic = f" ({SYNTHETIC_MARK})" if run is not None and run.synthetic else ""
    ticks = ticks_on(axis, run.ticks) if run is not None else ()
    return ChartData(
        title=f"throughput{synthetic}",
        series=(Series(f"{unit}/s", times_ns, values, "success", median),),
        axis=axis,
        gap_ns=_step_gap(run),
        y_range_key=f"{run.run_id if run is not None else ''} {unit}/s",
        format_value=fmt.number,
        spans=throttled_spans(
            (cache or TickValuesCache()).values_of(ticks, uuids), gap_ns_of([tick.t_ns for tick in ticks])
        ),
        empty=empty,
    )


def _step_gap(run: RunSnapshot | None) -> int:
    """Return the time without a step that counts as a gap: several times the longest recent step."""
    if run is None or not run.steps:
        return MIN_STEP_GAP_NS
    longest = max(step.step_ms for step in run.steps[-RECENT_STEPS:])
    return max(MIN_STEP_GAP_NS, int(longest * 4e6))


def _starting_words(run: RunSnapshot) -> str:
    """Return the phase of a run without steps, in words."""
    if not run.is_live:
        return "No step was completed."
    return f"Starting: {start_words(run.phase, run.detail)}…"


def _waiting_words(run: RunSnapshot | None) -> str:
    if run is None:
        return f"Press {RUN_KEY} to start a run."
    if not run.steps:
        return _starting_words(run)
    if all(step.samples is None for step in run.steps):
        return NO_SAMPLES
    return "No steps in this time."

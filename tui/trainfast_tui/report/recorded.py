"""A run with all its records, read once for a report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median

from trainfast_runner.records.json_lines import rest_of
from trainfast_runner.records.result import Result
from trainfast_runner.records.run_file import RunFile, Step
from trainfast_runner.records.run_records import TELEMETRY_FILE, RunRecords, read_records
from trainfast_runner.records.telemetry_lines import telemetry_tail
from trainfast_runner.records.thinned import Thinned
from trainfast_runner.records.tick import Tick
from trainfast_runner.running.follower import Follower, Rates, RunSnapshot, summed_tokens_per_s
from trainfast_runner.settings.world import ranks_with_samples
from trainfast_tui.charts.cpu_charts import cpu_charts
from trainfast_tui.charts.device_charts import device_charts
from trainfast_tui.charts.model import ChartData
from trainfast_tui.charts.readings import CPU_READINGS, reading_names
from trainfast_tui.charts.throughput_chart import throughput_chart
from trainfast_tui.charts.time_axis import TimeAxis
from trainfast_tui.live.snapshot import Snapshot

MOST_TICKS = 20_000
"""Samples that are charted, over five hours of one a second: a picture is 300 columns wide."""


@dataclass(frozen=True)
class ReportedRun:
    """A run that has ended, as a report shows it.

    `label` names it in tables; `figures` and `notes` are the words of `runs show`.
    """

    label: str
    directory: Path
    result: Result
    records: RunRecords
    snapshot: RunSnapshot
    figures: Sequence[tuple[str, str]]
    notes: Sequence[str]

    @property
    def run(self) -> RunFile | None:
        """`run.json`; None if it cannot be read."""
        return self.snapshot.run_file

    @property
    def origin_ns(self) -> int:
        """CLOCK_MONOTONIC at which the run was started, or of its first record if that is unknown."""
        if self.run is not None:
            return self.run.clock.monotonic_ns
        return min((series[0].t_ns for series in (self.snapshot.ticks, self.snapshot.steps) if series), default=0)


def read_run(
    label: str, directory: Path, result: Result, figures: Sequence[tuple[str, str]], notes: Sequence[str]
) -> ReportedRun:
    """Read the whole run: unlike a screen, a report shows more than the newest steps and samples."""
    records = read_records(directory)
    snapshot = Follower(directory).poll()
    whole = replace(snapshot, run_file=records.run, ticks=_ticks(directory), rates=_rates(records))
    return ReportedRun(label, directory, result, records, whole, figures, notes)


def _ticks(directory: Path) -> tuple[Tick, ...]:
    """Return every sample of the machine, of a long run an even share; none without a readable file."""
    kept = Thinned[Tick](MOST_TICKS)
    try:
        for tick in rest_of(telemetry_tail(directory / TELEMETRY_FILE, Tick)):
            kept.add(kept.total, tick)
    except OSError:
        return ()
    return tuple(kept.kept())


def _rates(records: RunRecords) -> Rates:
    """Return the throughput of each step that all data-parallel ranks wrote, summed over them."""
    run = records.run
    ranks = 1 if run is None else ranks_with_samples(run)
    parts: dict[int, list[Step]] = {}
    for rank, steps in records.steps.items():
        for step in steps if rank < ranks else ():
            if step.step_ms > 0 and step.samples is not None:
                parts.setdefault(step.step, []).append(step)
    whole = sorted(
        (max(step.t_ns for step in found), number, found) for number, found in parts.items() if len(found) == ranks
    )
    return Rates(
        tuple(number for _, number, _ in whole),
        tuple(t_ns for t_ns, _, _ in whole),
        tuple(sum(1e3 * (step.samples or 0) / step.step_ms for step in found) for _, _, found in whole),
        tuple(summed_tokens_per_s(found) for _, _, found in whole),
    )


def charts_of(run: ReportedRun) -> list[ChartData]:
    """Return throughput and every device reading over the whole run, with the first measured step marked."""
    axis = _axis(run)
    snapshot = Snapshot(taken_ns=axis.end_ns, run=run.snapshot, ticks=(), home_read=True)
    names = reading_names(snapshot)
    charts = [throughput_chart(snapshot, axis, "samples"), *device_charts(snapshot, axis, 0, len(names))]
    if names is not CPU_READINGS and run.run is not None and run.run.device == "cpu":
        # The screen has GPUs that a CPU run only watches in their place.
        charts += cpu_charts(run.snapshot.ticks, axis, has_run=True)
    measured = next((step for step in run.snapshot.steps if not step.warmup), None)
    begin_ns = None if measured is None else measured.t_ns - int(measured.step_ms * 1e6)
    # The first steps of a long run are not in its snapshot.
    if begin_ns is not None and not any(step.warmup for step in run.snapshot.steps):
        begin_ns = None
    return [replace(chart, gap_ns=_gap_ns(chart), cursor_ns=begin_ns) for chart in charts]


def _axis(run: ReportedRun) -> TimeAxis:
    """Return the axis from the launch to the last record."""
    rates, ticks = run.snapshot.rates, run.snapshot.ticks
    ends = [*rates.times_ns[-1:], *(tick.t_ns for tick in ticks[-1:])]
    return TimeAxis(run.origin_ns, max(ends, default=run.origin_ns + 1), "end")


def _gap_ns(chart: ChartData) -> int:
    """Return the gap of the chart; of thinned records several times their usual distance."""
    times = chart.series[0].times_ns if chart.series else ()
    apart = [after - before for before, after in pairwise(times)]
    return max(chart.gap_ns, int(4 * median(apart))) if apart else chart.gap_ns

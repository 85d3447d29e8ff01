"""The charts of a run over its whole length."""

from __future__ import annotations

from msgspec.structs import replace

from trainfast_tui.charts.chart_data import ChartData
from trainfast_tui.charts.cpu_charts import cpu_charts
from trainfast_tui.charts.device_charts import device_charts
from trainfast_tui.charts.readings import has_gpu_samples, reading_names
from trainfast_tui.charts.throughput_chart import throughput_chart
from trainfast_tui.charts.time_axis import TimeAxis, gap_ns_of
from trainfast_tui.live.snapshot import Snapshot, used_uuids
from trainfast_tui.report.reported_run import ReportedRun


def charts_of(run: ReportedRun) -> list[ChartData]:
    """Return throughput and every device reading over the whole run, with the first measured step marked."""
    axis = _axis(run)
    snapshot = Snapshot(taken_ns=axis.end_ns, run=run.snapshot, ticks=(), has_read_home=True)
    names = reading_names(snapshot)
    throughput = throughput_chart(snapshot, axis, "samples", sorted(used_uuids(run.snapshot)))
    # The steps of a long run are thinned: they lie further apart than the screen's.
    step_gap_ns = gap_ns_of(run.snapshot.rates.times_ns, throughput.gap_ns)
    charts = [replace(throughput, gap_ns=step_gap_ns), *device_charts(snapshot, axis, 0, len(names))]
    if has_gpu_samples(snapshot) and run.run_file is not None and run.run_file.device == "cpu":
        # On the screen the charts of watched GPUs replace those of the CPU; a report has both.
        charts += cpu_charts(run.snapshot.ticks, axis, has_run=True)
    measured_from_ns = _measured_from_ns(run)
    return [replace(chart, cursor_ns=measured_from_ns) for chart in charts]


def _measured_from_ns(run: ReportedRun) -> int | None:
    """Return the begin of the first measured step; None without one, or if the snapshot has only later steps."""
    steps = run.snapshot.steps
    first = next((step for step in steps if not step.warmup), None)
    # A long run's snapshot has only its newest steps, none of them warm-up.
    if first is None or not any(step.warmup for step in steps):
        return None
    return first.begin_ns


def _axis(run: ReportedRun) -> TimeAxis:
    """Return the axis from the launch to the last record."""
    rates, ticks = run.snapshot.rates, run.snapshot.ticks
    ends = [*rates.times_ns[-1:], *(tick.t_ns for tick in ticks[-1:])]
    return TimeAxis(run.origin_ns, max(ends, default=run.origin_ns + 1), is_live=False)

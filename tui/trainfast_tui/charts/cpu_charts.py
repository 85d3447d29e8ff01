"""The charts of the processor and its memory, with the run's processes beside the machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from trainfast_tui.charts.chart_data import ChartData, Series
from trainfast_tui.charts.readings import CPU_READING_NAMES
from trainfast_tui.charts.time_axis import TimeAxis, gap_ns_of
from trainfast_tui.text import format as fmt
from trainfast_tui.text.lines import Tone

if TYPE_CHECKING:
    from trainfast_runner.records.tick import Tick


def cpu_charts(ticks: Sequence[Tick], axis: TimeAxis, has_run: bool) -> list[ChartData]:
    """Return the charts of `CPU_READING_NAMES`, with the run's processes beside the machine if `has_run`."""
    cores = next((tick.host.cpu_count for tick in reversed(ticks) if tick.host.cpu_count), None)
    cpu = [_series("machine", ticks, lambda tick: tick.host.cpu_percent, "primary")]
    memory = [_series("machine", ticks, lambda tick: tick.host.memory_used_bytes, "primary")]
    if has_run:
        cpu.insert(0, _series("this run", ticks, partial(_run_cpu_percent, cores), "secondary"))
        memory.insert(0, _series("process memory", ticks, _run_memory_bytes, "secondary"))
    chart = partial(ChartData, axis=axis, gap_ns=gap_ns_of([tick.t_ns for tick in ticks]))
    return [
        chart(title=CPU_READING_NAMES[0], series=tuple(cpu), format_value=fmt.percent, y_max=100.0),
        chart(title=CPU_READING_NAMES[1], series=tuple(memory), format_value=fmt.size, binary=True),
    ]


def _series(name: str, ticks: Sequence[Tick], value_of: Callable[[Tick], float | None], tone: Tone) -> Series:
    """Return a reading over time up to its last known value."""
    count = len(ticks)
    while count and value_of(ticks[count - 1]) is None:
        count -= 1
    shown_ticks = ticks[:count]
    return Series(name, [tick.t_ns for tick in shown_ticks], [value_of(tick) for tick in shown_ticks], tone)


def _run_cpu_percent(cores: int | None, tick: Tick) -> float | None:
    run = tick.host.run
    return None if run is None or run.cpu_percent is None or not cores or not run.processes else run.cpu_percent / cores


def _run_memory_bytes(tick: Tick) -> float | None:
    """Return the resident memory of the run's processes; None once all have ended."""
    run = tick.host.run
    return None if run is None or not run.processes else run.memory_rss_bytes or None

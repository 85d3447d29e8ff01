"""From a snapshot to the data of the charts: throughput and device readings on one time axis."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from trainfast_runner.machine.telemetry.slowdown import slows_down_at_c
from trainfast_tui.charts.model import ChartData, Limit, Series, Span, Tone
from trainfast_tui.live.snapshot import Snapshot
from trainfast_tui.text import format as fmt
from trainfast_tui.text.phases import STARTING
from trainfast_tui.text.shades import causes_of

if TYPE_CHECKING:
    from trainfast_runner.records.tick import DeviceReading, Tick
    from trainfast_runner.running.follower import RunSnapshot

SECOND_NS = 1_000_000_000
WINDOWS_S = (30, 60, 120, 300, 600, 1800)
DEFAULT_WINDOW = 2
TICK_GAP_NS = 5 * SECOND_NS
LEAST_STEP_GAP_NS = 5 * SECOND_NS
TONES: tuple[Tone, ...] = ("primary", "secondary", "accent", "success")
MOST_LINES = 2
"""More devices than this are drawn as their highest and lowest reading."""


@dataclass(frozen=True, slots=True)
class TimeAxis:
    """The time axis of all charts of one frame."""

    start_ns: int
    end_ns: int
    now_label: str


@dataclass(frozen=True, slots=True)
class Reading:
    """One device reading that can be charted."""

    name: str
    of: Callable[[DeviceReading], float | None]
    unit: fmt.Formatter
    limit: Callable[[DeviceReading], float | None] | None = None
    limit_label: str = ""
    y_max: float | None = None
    binary: bool = False
    over_limit: float | None = None
    """Headroom of the y axis above the limit, in the reading's unit; its lower end then follows the data.

    None for an axis from zero to the data or the limit.
    """


GPU_READINGS: tuple[Reading, ...] = (
    Reading("GPU utilization", lambda gpu: gpu.gpu_utilization_percent, fmt.percent, y_max=100.0),
    Reading(
        "GPU memory",
        lambda gpu: gpu.memory_used_bytes,
        fmt.size,
        lambda gpu: gpu.memory_total_bytes,
        "total",
        binary=True,
    ),
    Reading("temperature", lambda gpu: gpu.temperature_c, fmt.celsius, slows_down_at_c, "slowdown", over_limit=13.0),
    Reading("power", lambda gpu: gpu.power_w, fmt.watts, lambda gpu: gpu.power_limit_w, "cap"),
    Reading("SM clock", lambda gpu: gpu.sm_clock_mhz, fmt.megahertz, lambda gpu: gpu.sm_clock_max_mhz, "most"),
)


CPU_READINGS = ("CPU of all cores", "memory")


def time_axis(snapshot: Snapshot, window: int) -> TimeAxis:
    """Return the last `WINDOWS_S[window]` seconds, up to now or to the end of an ended run."""
    run = snapshot.run
    if run is None or run.is_live:
        length_s = WINDOWS_S[window]
        if run is not None and run.run_file is not None:
            # A young run fills the chart; the axis grows in few steps, since each redraws everything.
            age_s = (snapshot.taken_ns - run.run_file.clock.monotonic_ns) / 1e9
            length_s = next((shorter for shorter in WINDOWS_S[:window] if shorter >= age_s > 0), length_s)
        return TimeAxis(snapshot.taken_ns - length_s * SECOND_NS, snapshot.taken_ns, "now")
    length_ns = WINDOWS_S[window] * SECOND_NS
    end_ns = max([run.ticks[-1].t_ns] if run.ticks else [], default=0)
    if run.steps:
        end_ns = max(end_ns, run.steps[-1].t_ns)
    # The last event is the end, unless the end was found out later.
    end_ns = max([end_ns, *(event.t_ns for event in run.events[-1:] if event.t_ns - end_ns < TICK_GAP_NS)])
    first_ns = min([series[0].t_ns for series in (run.ticks, run.steps) if series], default=end_ns - length_ns)
    # A short run fills the chart; of a long one the end is shown.
    start_ns = max(end_ns - length_ns, min(first_ns, end_ns - 10 * SECOND_NS))
    return TimeAxis(start_ns, end_ns, "end")


@dataclass(frozen=True, slots=True)
class TickValues:
    """The values of one tick for the chosen devices."""

    tick: Tick
    values: tuple[tuple[float | None, ...], ...]
    """For each of `GPU_READINGS` each device's value, or of many devices the highest and the lowest."""
    causes: frozenset[str]
    """The causes that throttle a chosen device, or any device if none is chosen."""


class TickMemory:
    """Remembers the values of each tick for the chosen devices: a chart is drawn from hundreds of ticks."""

    def __init__(self) -> None:
        self._chosen: Sequence[str] = ()
        self._known: dict[int, TickValues] = {}

    def of(self, ticks: Sequence[Tick], chosen: Sequence[str]) -> list[TickValues]:
        """Return the values of these ticks and forget those of others."""
        if chosen != self._chosen:
            self._chosen, self._known = chosen, {}
        found = []
        for tick in ticks:
            known = self._known.get(tick.t_ns)
            found.append(known if known is not None and known.tick is tick else _values_of(tick, chosen))
        self._known = {values.tick.t_ns: values for values in found}
        return found


def _values_of(tick: Tick, chosen: Sequence[str]) -> TickValues:
    by_uuid = {device.uuid: device for device in tick.devices if device.uuid}
    devices = [by_uuid.get(uuid) for uuid in chosen]
    values: list[tuple[float | None, ...]] = []
    for reading in GPU_READINGS:
        drawn = tuple(None if device is None else reading.of(device) for device in devices)
        if len(devices) > MOST_LINES:
            known = [value for value in drawn if value is not None]
            drawn = max(known, default=None), min(known, default=None)
        values.append(drawn)
    causes: frozenset[str] = frozenset()
    for one in tick.devices:
        if one.throttle_reasons and (not chosen or one.uuid in chosen):
            causes |= causes_of(one.throttle_reasons)
    return TickValues(tick, tuple(values), causes)


def throughput(
    snapshot: Snapshot, axis: TimeAxis, noun: str, chosen: Sequence[str] = (), memory: TickMemory | None = None
) -> ChartData:
    """Return the chart of throughput by step; `noun` is samples or tokens."""
    run = snapshot.run
    rates = run.rates if run is not None else None
    values: Sequence[float] = ()
    empty = _waiting_words(run)
    if rates is not None:
        values = rates.samples_per_s if noun == "samples" else rates.tokens_per_s
        # An image that is not cut into patches has no tokens.
        if noun == "tokens" and values and not any(values):
            values, empty = (), "This model has no tokens; t shows samples/s."
    synthetic = " (synthetic data)" if run is not None and run.synthetic else ""
    return ChartData(
        title=f"throughput{synthetic}",
        series=(Series(f"{noun}/s", rates.times_ns if rates is not None and values else (), values, "success"),),
        t_min_ns=axis.start_ns,
        t_max_ns=axis.end_ns,
        gap_ns=_step_gap(run),
        scale_of=f"{run.run_id if run is not None else ''} {noun}/s",
        unit=fmt.number,
        spans=_spans((memory or TickMemory()).of(_recent(run.ticks, axis), chosen)) if run is not None else (),
        empty=empty,
        now_label=axis.now_label,
    )


def reading_names(snapshot: Snapshot) -> tuple[str, ...]:
    """Return the names of the readings that can be charted, the most telling first."""
    ticks = _ticks(snapshot)
    return tuple(reading.name for reading in GPU_READINGS) if ticks and ticks[-1].devices else CPU_READINGS


def device_charts(
    snapshot: Snapshot, axis: TimeAxis, first: int, count: int, memory: TickMemory | None = None
) -> list[ChartData]:
    """Return charts of `count` readings from number `first` on, starting over after the last."""
    run = snapshot.run
    ticks = _ticks(snapshot)
    names = reading_names(snapshot)
    wanted = [(first + at) % len(names) for at in range(count)]
    recent = _recent(ticks, axis)
    if names is CPU_READINGS:
        charts = cpu_charts(recent, axis, run is not None)
        return [charts[at] for at in wanted]
    chosen = _chosen(run, ticks[-1])
    values = (memory or TickMemory()).of(recent, chosen)
    by_uuid = {device.uuid: device for device in recent[-1].devices} if recent else {}
    newest = [by_uuid.get(uuid) for uuid in chosen] if recent else []
    times = [tick.t_ns for tick in recent]
    spans = _spans(values)
    return [_gpu_chart(at, times, values, newest, spans, axis) for at in wanted]


def used_uuids(run: RunSnapshot | None) -> frozenset[str]:
    """Return the UUIDs of the GPUs the run uses or watches."""
    if run is None or run.run_file is None:
        return frozenset()
    return frozenset((*run.run_file.device_uuids, *run.run_file.watch_uuids))


def _ticks(snapshot: Snapshot) -> Sequence[Tick]:
    run = snapshot.run
    return snapshot.machine_ticks if run is None or run.is_live else run.ticks


def _recent(ticks: Sequence[Tick], axis: TimeAxis) -> Sequence[Tick]:
    """Return the ticks on the axis and one before it."""
    return ticks[bisect_left(ticks, axis.start_ns - TICK_GAP_NS, key=lambda tick: tick.t_ns) :]


def _chosen(run: RunSnapshot | None, tick: Tick) -> list[str]:
    used = used_uuids(run)
    uuids = [device.uuid for device in tick.devices if device.uuid]
    return [uuid for uuid in uuids if uuid in used] or uuids


def _gpu_chart(
    number: int,
    times: list[int],
    ticks: list[TickValues],
    newest: list[DeviceReading | None],
    spans: tuple[Span, ...],
    axis: TimeAxis,
) -> ChartData:
    """Return one reading's chart; `newest` are the chosen devices now, of many only the extremes are drawn."""
    reading = GPU_READINGS[number]
    if len(newest) > MOST_LINES:
        lines: list[tuple[str, Tone]] = [(f"highest of {len(newest)} GPUs", "primary"), ("lowest", "secondary")]
    else:
        lines = [
            (f"GPU {device.index}" if device is not None else "GPU", TONES[place % len(TONES)])
            for place, device in enumerate(newest)
        ]
    series = tuple(
        Series(name, times, [tick.values[number][place] for tick in ticks], tone)
        for place, (name, tone) in enumerate(lines)
    )
    limits = _limits(reading, [device for device in newest if device is not None])
    y_min, y_max = _ends(reading, limits)
    return ChartData(
        title=reading.name,
        series=series,
        t_min_ns=axis.start_ns,
        t_max_ns=axis.end_ns,
        gap_ns=TICK_GAP_NS,
        unit=reading.unit,
        spans=spans,
        limits=limits,
        y_min=y_min,
        y_max=y_max,
        binary=reading.binary,
        empty="This GPU does not report it." if ticks else "No samples yet.",
        now_label=axis.now_label,
    )


def _ends(reading: Reading, limits: Sequence[Limit]) -> tuple[float | None, float | None]:
    """Return the ends of the y axis while the data stays inside; None follows the data."""
    if reading.over_limit is None or not limits:
        return 0.0, reading.y_max
    return None, max(limit.value for limit in limits) + reading.over_limit


def _limits(reading: Reading, devices: Sequence[DeviceReading]) -> tuple[Limit, ...]:
    if reading.limit is None:
        return ()
    values = [value for device in devices if (value := reading.limit(device)) is not None]
    return (Limit(min(values), reading.limit_label),) if values else ()


def cpu_charts(recent: Sequence[Tick], axis: TimeAxis, has_run: bool) -> list[ChartData]:
    """Return the charts of `CPU_READINGS`, with the run's processes beside the machine if `has_run`."""
    cores = next((tick.host.cpu_count for tick in reversed(recent) if tick.host.cpu_count), None)
    cpu = [_series("machine", recent, lambda tick: tick.host.cpu_percent, "primary")]
    memory = [_series("machine", recent, lambda tick: tick.host.memory_used_bytes, "primary")]
    if has_run:
        cpu.insert(0, _series("this run", recent, partial(_run_cpu_percent, cores), "secondary"))
        memory.insert(0, _series("process memory", recent, _run_memory_bytes, "secondary"))
    chart = partial(
        ChartData, t_min_ns=axis.start_ns, t_max_ns=axis.end_ns, gap_ns=TICK_GAP_NS, now_label=axis.now_label
    )
    return [
        chart(title=CPU_READINGS[0], series=tuple(cpu), unit=fmt.percent, y_max=100.0),
        chart(title=CPU_READINGS[1], series=tuple(memory), unit=fmt.size, binary=True),
    ]


def _series(name: str, ticks: Sequence[Tick], of: Callable[[Tick], float | None], tone: Tone) -> Series:
    """Return a reading over time up to its last known value."""
    known = len(ticks)
    while known and of(ticks[known - 1]) is None:
        known -= 1
    shown = ticks[:known]
    return Series(name, [tick.t_ns for tick in shown], [of(tick) for tick in shown], tone)


def _run_cpu_percent(cores: int | None, tick: Tick) -> float | None:
    run = tick.host.run
    return None if run is None or run.cpu_percent is None or not cores or not run.processes else run.cpu_percent / cores


def _run_memory_bytes(tick: Tick) -> float | None:
    """Return the resident memory of the run's processes; None once all have ended."""
    run = tick.host.run
    return None if run is None or not run.processes else run.memory_rss_bytes or None


def _spans(ticks: Sequence[TickValues]) -> tuple[Span, ...]:
    """Return the spans in which a chosen device was throttled, by cause."""
    spans: list[Span] = []
    start: dict[str, int] = {}
    held: frozenset[str] = frozenset()
    for values in ticks:
        if values.causes == held:
            continue
        t_ns = values.tick.t_ns
        spans += [Span(start.pop(ended), t_ns, ended) for ended in held - values.causes]
        start.update(dict.fromkeys(values.causes - held, t_ns))
        held = values.causes
    spans += [Span(since, ticks[-1].tick.t_ns, kind) for kind, since in start.items()]
    return tuple(sorted(spans, key=lambda span: (span.start_ns, span.kind)))


def _step_gap(run: RunSnapshot | None) -> int:
    """Return the time without a step that counts as a gap: several times the longest recent step."""
    if run is None or not run.steps:
        return LEAST_STEP_GAP_NS
    longest = max(step.step_ms for step in run.steps[-20:])
    return max(LEAST_STEP_GAP_NS, int(longest * 4e6))


def starting_words(run: RunSnapshot) -> str:
    """Return the phase of a run without steps, in words."""
    if not run.is_live:
        return "No step was completed."
    words = STARTING.get(run.phase, run.phase or "starting the training process")
    return f"Starting: {words}" + (f" ({run.detail})" if run.detail else "") + "…"


def _waiting_words(run: RunSnapshot | None) -> str:
    if run is None:
        return "Press r to start a run."
    return starting_words(run) if not run.steps else "No steps in this stretch of time."

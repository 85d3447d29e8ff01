"""The charts of device readings: one line a GPU, or the highest and the lowest of many; without a GPU the processor."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from trainfast_runner.errors import highest, lowest
from trainfast_runner.machine.telemetry.throttle import causes_of, slows_down_at_c
from trainfast_tui.charts.chart_data import ChartData, Limit, Series, ThrottledSpan, TimeAxis, gap_ns_of, ticks_on
from trainfast_tui.live.snapshot import Snapshot, used_uuids
from trainfast_tui.text import format as fmt
from trainfast_tui.text.event_words import start_words
from trainfast_tui.text.format import SYNTHETIC_MARK, Tone
from trainfast_tui.text.keys import RUN_KEY

if TYPE_CHECKING:
    from trainfast_runner.records.tick import DeviceReading, Tick
    from trainfast_runner.running.follower import RunSnapshot


LINE_TONES: tuple[Tone, Tone] = ("primary", "secondary")
MAX_LINES = len(LINE_TONES)
"""More devices than this are drawn as their highest and lowest reading."""


def device_charts(snapshot: Snapshot, axis: TimeAxis, first: int, count: int) -> list[ChartData]:
    """Return charts of `count` readings from number `first` on, starting over after the last."""
    ticks = charted_ticks(snapshot)
    names = reading_names(snapshot)
    indexes = [(first + number) % len(names) for number in range(count)]
    recent = ticks_on(axis, ticks)
    if not has_gpu_samples(snapshot):
        charts = cpu_charts(recent, axis, snapshot.run is not None)
        return [charts[number] for number in indexes]
    uuids = charted_uuids(snapshot.run, ticks[-1])
    by_uuids = ({device.uuid: device for device in tick.devices} for tick in recent)
    gpus = [[by_uuid.get(uuid) for uuid in uuids] for by_uuid in by_uuids]
    gap_ns = gap_ns_of([tick.t_ns for tick in recent])
    spans = throttled_spans(recent, uuids, gap_ns)
    return [_gpu_chart(GPU_READINGS[number], recent, gpus, spans, gap_ns, axis) for number in indexes]


def _gpu_chart(
    reading: Reading,
    ticks: Sequence[Tick],
    gpus: Sequence[Sequence[DeviceReading | None]],
    spans: tuple[ThrottledSpan, ...],
    gap_ns: int,
    axis: TimeAxis,
) -> ChartData:
    """Return one reading's chart; `gpus` has the charted GPUs of each tick, of over `MAX_LINES` only the extremes."""
    values = [[None if gpu is None else reading.value_of(gpu) for gpu in row] for row in gpus]
    newest = gpus[-1] if gpus else []
    if len(newest) > MAX_LINES:
        names = [f"highest of {len(newest)} GPUs", "lowest"]
        values = [[highest(row), lowest(row)] for row in values]
    else:
        names = [f"GPU {gpu.index}" if gpu is not None else "GPU" for gpu in newest]
    times = [tick.t_ns for tick in ticks]
    limit_of = reading.limit_of or (lambda gpu: None)
    limits = [limit for gpu in newest if gpu is not None and (limit := limit_of(gpu)) is not None]
    return ChartData(
        title=reading.name,
        series=tuple(
            Series(name, times, [row[index] for row in values], LINE_TONES[index]) for index, name in enumerate(names)
        ),
        axis=axis,
        gap_ns=gap_ns,
        format_value=reading.format_value,
        spans=spans,
        limit=Limit(min(limits), reading.limit_label) if limits else None,
        y_min=reading.y_min,
        y_max=reading.y_max,
        binary=reading.binary,
        empty="No samples yet." if not ticks else "The GPUs do not report it.",
    )


def cpu_charts(ticks: Sequence[Tick], axis: TimeAxis, has_run: bool) -> list[ChartData]:
    """Return the charts of `CPU_READING_NAMES`, with the run's processes beside the machine if `has_run`."""
    cores = next((tick.host.cpu_count for tick in reversed(ticks) if tick.host.cpu_count), None)
    times = [tick.t_ns for tick in ticks]
    cpu = [Series("machine", times, [tick.host.cpu_percent for tick in ticks])]
    memory = [Series("machine", times, [tick.host.memory_used_bytes for tick in ticks])]
    if has_run:
        cpu.insert(0, Series("this run", times, [_run_cpu_percent(cores, tick) for tick in ticks], "secondary"))
        memory.insert(0, Series("process memory", times, [_run_memory_bytes(tick) for tick in ticks], "secondary"))
    chart = partial(ChartData, axis=axis, gap_ns=gap_ns_of(times))
    return [
        chart(title=CPU_READING_NAMES[0], series=tuple(cpu), format_value=fmt.percent, y_max=100.0),
        chart(title=CPU_READING_NAMES[1], series=tuple(memory), format_value=fmt.size, binary=True),
    ]


def _run_cpu_percent(cores: int | None, tick: Tick) -> float | None:
    run = tick.host.run
    return None if run is None or run.cpu_percent is None or not cores or not run.processes else run.cpu_percent / cores


def _run_memory_bytes(tick: Tick) -> float | None:
    """Return the resident memory of the run's processes; None once all have ended."""
    run = tick.host.run
    return None if run is None or not run.processes else run.memory_rss_bytes or None


NO_SAMPLES = "The script shows no samples: start it with --samples-per-step N."


def throughput_chart(
    snapshot: Snapshot, axis: TimeAxis, uuids: Collection[str] = (), *, in_tokens: bool = False
) -> ChartData:
    """Return the chart of throughput by step, in samples/s or `in_tokens`/s.

    Time in which one of the GPUs `uuids` was throttled, or any GPU if there are none, is shaded.
    """
    run = snapshot.run
    rates = run.rates if run is not None else None
    times: Sequence[int] = ()
    values: Sequence[float | None] = ()
    if rates is not None:
        times, values = rates.times_ns, rates.tokens_per_s if in_tokens else rates.samples_per_s
    synthetic = f" ({SYNTHETIC_MARK})" if run is not None and run.synthetic else ""
    ticks = ticks_on(axis, run.ticks) if run is not None else ()
    return ChartData(
        title=f"throughput{synthetic}",
        series=(Series("tokens/s" if in_tokens else "samples/s", times, values, "success"),),
        axis=axis,
        gap_ns=gap_ns_of(times),
        y_range_key=f"{run.run_id if run is not None else ''} {in_tokens}",
        format_value=fmt.number,
        spans=throttled_spans(ticks, uuids, gap_ns_of([tick.t_ns for tick in ticks])),
        empty=_waiting_words(run),
    )


def _waiting_words(run: RunSnapshot | None) -> str:
    """Return the reason that a chart of throughput is empty."""
    if run is None:
        return f"Press {RUN_KEY} to start a run."
    if not run.steps:
        return f"Starting: {start_words(run.phase, run.detail)}…" if run.is_live else "No step was completed."
    if all(step.samples is None for step in run.steps):
        return NO_SAMPLES
    return "No steps in this time."


class Reading(msgspec.Struct, frozen=True):
    """One device reading that can be charted."""

    name: str
    value_of: Callable[[DeviceReading], float | None]
    format_value: fmt.Formatter
    limit_of: Callable[[DeviceReading], float | None] | None = None
    """Returns a device's limit; None if the reading has none."""
    limit_label: str = ""
    y_max: float | None = None
    """The upper end of the y axis; None follows the data."""
    binary: bool = False
    """Round the ends of the y axis to powers of two, for bytes."""
    y_min: float | None = 0.0
    """The lower end of the y axis; None follows the data."""


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
    Reading("temperature", lambda gpu: gpu.temperature_c, fmt.celsius, slows_down_at_c, "slowdown", y_min=None),
    Reading("power", lambda gpu: gpu.power_w, fmt.watts, lambda gpu: gpu.power_limit_w, "cap"),
    Reading("SM clock", lambda gpu: gpu.sm_clock_mhz, fmt.megahertz, lambda gpu: gpu.sm_clock_max_mhz, "max"),
)
CPU_READING_NAMES = ("CPU of all cores", "memory")


def has_gpu_samples(snapshot: Snapshot) -> bool:
    """True if a GPU has a sample; else the CPU is charted."""
    ticks = charted_ticks(snapshot)
    return bool(ticks) and bool(ticks[-1].devices)


def reading_names(snapshot: Snapshot) -> tuple[str, ...]:
    """Return the names of the readings that can be charted, the most important first."""
    return tuple(reading.name for reading in GPU_READINGS) if has_gpu_samples(snapshot) else CPU_READING_NAMES


def charted_ticks(snapshot: Snapshot) -> Sequence[Tick]:
    """Return the machine's samples, or an ended run's own."""
    run = snapshot.run
    return snapshot.machine_ticks if run is None or run.is_live else run.ticks


def charted_uuids(run: RunSnapshot | None, tick: Tick) -> list[str]:
    """Return the UUIDs of the GPUs in this tick that the run uses or watches, or of all if it uses none of them."""
    run_uuids = used_uuids(run)
    uuids = [device.uuid for device in tick.devices if device.uuid]
    return [uuid for uuid in uuids if uuid in run_uuids] or uuids


def throttled_spans(ticks: Sequence[Tick], uuids: Collection[str], gap_ns: int) -> tuple[ThrottledSpan, ...]:
    """Return the spans in which one of the GPUs `uuids`, or any without them, was throttled, by cause.

    A span ends at a gap of over `gap_ns`.
    """
    spans: list[ThrottledSpan] = []
    begun_ns: dict[str, int] = {}
    last_ns = ticks[0].t_ns if ticks else 0
    for tick in ticks:
        causes: set[str] = set()
        for device in tick.devices:
            if device.throttle_reasons and (not uuids or device.uuid in uuids):
                causes |= causes_of(device.throttle_reasons)
        if tick.t_ns - last_ns > gap_ns:
            spans += [ThrottledSpan(since_ns, last_ns, cause) for cause, since_ns in begun_ns.items()]
            begun_ns = {}
        spans += [ThrottledSpan(begun_ns.pop(cause), tick.t_ns, cause) for cause in begun_ns.keys() - causes]
        begun_ns.update(dict.fromkeys(causes - begun_ns.keys(), tick.t_ns))
        last_ns = tick.t_ns
    spans += [ThrottledSpan(since_ns, last_ns, cause) for cause, since_ns in begun_ns.items()]
    return tuple(sorted(spans, key=lambda span: (span.start_ns, span.cause)))

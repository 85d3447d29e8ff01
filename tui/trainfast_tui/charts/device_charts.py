"""The charts of device readings: one line a GPU, or the highest and the lowest of many; without a GPU the processor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from trainfast_tui.charts.chart_data import ChartData, Limit, Series, ThrottledSpan
from trainfast_tui.charts.cpu_charts import cpu_charts
from trainfast_tui.charts.readings import (
    GPU_READINGS,
    Reading,
    charted_ticks,
    charted_uuids,
    has_gpu_samples,
    reading_names,
)
from trainfast_tui.charts.tick_values import MAX_LINES, TickValues, TickValuesCache, throttled_spans
from trainfast_tui.charts.time_axis import TimeAxis, gap_ns_of, ticks_on
from trainfast_tui.live.snapshot import Snapshot
from trainfast_tui.text.lines import Tone

if TYPE_CHECKING:
    from trainfast_runner.records.tick import DeviceReading

LINE_TONES: tuple[Tone, Tone] = ("primary", "secondary")


def device_charts(
    snapshot: Snapshot, axis: TimeAxis, first: int, count: int, cache: TickValuesCache | None = None
) -> list[ChartData]:
    """Return charts of `count` readings from number `first` on, starting over after the last."""
    ticks = charted_ticks(snapshot)
    names = reading_names(snapshot)
    indexes = [(first + number) % len(names) for number in range(count)]
    recent = ticks_on(axis, ticks)
    if not has_gpu_samples(snapshot):
        charts = cpu_charts(recent, axis, snapshot.run is not None)
        return [charts[number] for number in indexes]
    uuids = charted_uuids(snapshot.run, ticks[-1])
    tick_values = (cache or TickValuesCache()).values_of(recent, uuids)
    by_uuid = {device.uuid: device for device in recent[-1].devices} if recent else {}
    newest = [by_uuid.get(uuid) for uuid in uuids] if recent else []
    times = [tick.t_ns for tick in recent]
    gap_ns = gap_ns_of(times)
    spans = throttled_spans(tick_values, gap_ns)
    return [_gpu_chart(number, times, gap_ns, tick_values, newest, spans, axis) for number in indexes]


def _gpu_chart(
    number: int,
    times: list[int],
    gap_ns: int,
    tick_values: list[TickValues],
    newest: list[DeviceReading | None],
    spans: tuple[ThrottledSpan, ...],
    axis: TimeAxis,
) -> ChartData:
    """Return one reading's chart; of over `MAX_LINES` GPUs (`newest`) only the highest and the lowest are drawn."""
    reading = GPU_READINGS[number]
    if len(newest) > MAX_LINES:
        names = [f"highest of {len(newest)} GPUs", "lowest"]
    else:
        names = [f"GPU {device.index}" if device is not None else "GPU" for device in newest]
    series = tuple(
        Series(name, times, [values.values[number][index] for values in tick_values], LINE_TONES[index])
        for index, name in enumerate(names)
    )
    limit = _limit(reading, [device for device in newest if device is not None])
    y_min, y_max = _ends(reading, limit)
    return ChartData(
        title=reading.name,
        series=series,
        axis=axis,
        gap_ns=gap_ns,
        format_value=reading.format_value,
        spans=spans,
        limit=limit,
        y_min=y_min,
        y_max=y_max,
        binary=reading.binary,
        empty=_empty_words(len(newest)) if tick_values else "No samples yet.",
    )


def _empty_words(gpus: int) -> str:
    return "This GPU does not report it." if gpus == 1 else "No GPU reports it."


def _ends(reading: Reading, limit: Limit | None) -> tuple[float | None, float | None]:
    """Return the ends of the y axis while the data stays inside; None follows the data."""
    if reading.limit_headroom is None or limit is None:
        return 0.0, reading.y_max
    return None, limit.value + reading.limit_headroom


def _limit(reading: Reading, devices: Sequence[DeviceReading]) -> Limit | None:
    """Return the lowest limit of the devices; None without one."""
    if reading.limit_of is None:
        return None
    values = [value for device in devices if (value := reading.limit_of(device)) is not None]
    return Limit(min(values), reading.limit_label) if values else None

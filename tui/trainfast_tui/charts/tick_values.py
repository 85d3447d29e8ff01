"""The charted values of each tick, kept between frames, and the throttled time between ticks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from trainfast_runner.known_values import highest, lowest
from trainfast_runner.machine.telemetry.throttle import causes_of
from trainfast_tui.charts.chart_data import ThrottledSpan
from trainfast_tui.charts.readings import GPU_READINGS

if TYPE_CHECKING:
    from trainfast_runner.records.tick import Tick

MAX_LINES = 2
"""More devices than this are drawn as their highest and lowest reading."""


class TickValues(msgspec.Struct, frozen=True):
    """The values of one tick for the charted GPUs."""

    tick: Tick
    values: tuple[tuple[float | None, ...], ...]
    """Values of each of `GPU_READINGS` by GPU; with more than `MAX_LINES` GPUs only the highest and lowest."""
    causes: frozenset[str]
    """The causes that throttle a charted GPU, or any GPU if none is charted."""


class TickValuesCache:
    """Keeps the values of each tick for the charted GPUs: a chart is drawn from hundreds of ticks."""

    def __init__(self) -> None:
        self._uuids: Sequence[str] = ()
        self._by_time: dict[int, TickValues] = {}
        """The values of the newest ticks, by `t_ns`."""

    def values_of(self, ticks: Sequence[Tick], uuids: Sequence[str]) -> list[TickValues]:
        """Return the values of these ticks for the GPUs `uuids`, and forget those of other ticks."""
        if uuids != self._uuids:
            self._uuids, self._by_time = uuids, {}
        values = []
        for tick in ticks:
            cached = self._by_time.get(tick.t_ns)
            values.append(cached if cached is not None and cached.tick is tick else _values_of(tick, uuids))
        self._by_time = {tick_values.tick.t_ns: tick_values for tick_values in values}
        return values


def _values_of(tick: Tick, uuids: Sequence[str]) -> TickValues:
    by_uuid = {device.uuid: device for device in tick.devices if device.uuid}
    devices = [by_uuid.get(uuid) for uuid in uuids]
    values: list[tuple[float | None, ...]] = []
    for reading in GPU_READINGS:
        drawn_values = tuple(None if device is None else reading.value_of(device) for device in devices)
        if len(devices) > MAX_LINES:
            drawn_values = highest(drawn_values), lowest(drawn_values)
        values.append(drawn_values)
    causes: frozenset[str] = frozenset()
    for device in tick.devices:
        if device.throttle_reasons and (not uuids or device.uuid in uuids):
            causes |= causes_of(device.throttle_reasons)
    return TickValues(tick, tuple(values), causes)


def throttled_spans(tick_values: Sequence[TickValues], gap_ns: int) -> tuple[ThrottledSpan, ...]:
    """Return the spans in which a charted GPU was throttled, by cause; a span ends at a gap of over `gap_ns`."""
    spans: list[ThrottledSpan] = []
    begun_ns: dict[str, int] = {}
    last_ns: int | None = None
    for values in tick_values:
        t_ns = values.tick.t_ns
        if last_ns is not None and t_ns - last_ns > gap_ns:
            spans += [ThrottledSpan(since_ns, last_ns, cause) for cause, since_ns in begun_ns.items()]
            begun_ns = {}
        last_ns = t_ns
        if begun_ns.keys() == values.causes:
            continue
        spans += [ThrottledSpan(begun_ns.pop(cause), t_ns, cause) for cause in begun_ns.keys() - values.causes]
        begun_ns.update(dict.fromkeys(values.causes - begun_ns.keys(), t_ns))
    spans += [ThrottledSpan(since_ns, tick_values[-1].tick.t_ns, cause) for cause, since_ns in begun_ns.items()]
    return tuple(sorted(spans, key=lambda span: (span.start_ns, span.cause)))

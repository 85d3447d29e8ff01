"""Lines of `telemetry.jsonl` as earlier versions wrote them in a long run: between whole ticks only the changes."""

from __future__ import annotations

import operator
from typing import Any

import msgspec

from trainfast_runner.records.telemetry_lines import TickChange
from trainfast_runner.records.tick import DeviceReading, HostReading, Tick

WHOLE_EVERY = 30
"""Lines from one whole tick to the next, where not all are: half a minute at a tick a second."""
WHOLE_FIRST = 600
"""So many lines were whole: ten minutes."""
_ROW = operator.attrgetter(*DeviceReading.__struct_fields__)


class TickEncoder:
    """Turns ticks into lines, one after the other, the first `whole_first` of them whole."""

    def __init__(self, whole_first: int = WHOLE_FIRST) -> None:
        self._before: Tick | None = None
        self._since_whole = 0
        self._whole_left = whole_first

    def line(self, tick: Tick) -> Tick | TickChange:
        """The tick itself where a whole line is due, else what changed since the last one that was given."""
        before, self._before = self._before, tick
        self._whole_left -= 1
        self._since_whole += 1
        is_due = self._whole_left >= 0 or self._since_whole >= WHOLE_EVERY
        if before is None or is_due or len(before.devices) != len(tick.devices):
            self._since_whole = 0
            return tick
        return TickChange(
            t_ns=tick.t_ns,
            since_ns=before.t_ns,
            sample_us=tick.sample_us,
            nvml_us=tick.nvml_us,
            host=_host_change(before.host, tick.host),
            columns=_columns(before.devices, tick.devices),
            missing=_changed(before.missing, tick.missing),
        )

    def start_again(self) -> None:
        """The last line did not reach the file: the next one is whole."""
        self._before = None


def _columns(before: list[DeviceReading], now: list[DeviceReading]) -> dict[str, list[Any] | dict[int, Any]]:
    columns: dict[str, list[Any] | dict[int, Any]] = {}
    earlier_columns, columns_now = zip(*map(_ROW, before), strict=True), zip(*map(_ROW, now), strict=True)
    for name, earlier, values in zip(DeviceReading.__struct_fields__, earlier_columns, columns_now, strict=False):
        if values != earlier:
            changed = {place: value for place, value in enumerate(values) if value != earlier[place]}
            columns[name] = list(values) if 2 * len(changed) > len(values) else changed
    return columns


def _host_change(before: HostReading, now: HostReading) -> dict[str, Any]:
    host = _changed(_fields(before), _fields(now))
    if before.run is not None and now.run is not None and "run" in host:
        host["run"] = _changed(_fields(before.run), _fields(now.run))
    return host


def _fields(struct: msgspec.Struct) -> dict[str, Any]:
    return {name: getattr(struct, name) for name in struct.__struct_fields__}


def _changed(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """The entries that are new or different, and None for those that are gone."""
    gone = dict.fromkeys(before.keys() - now.keys())
    return gone | {key: value for key, value in now.items() if key not in before or before[key] != value}

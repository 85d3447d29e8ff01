"""The lines of `telemetry.jsonl`: whole ticks, and in a long run between two of them what changed since the last line.

A whole line is what any script can read, and costs the sampler a sixth of finding out what changed. Eight GPUs fill it
with 12 kB, of which most is the same a second later, so a file that would grow by 45 MB an hour gets changes after its
first minutes. A line that holds changes names the line it builds on, so that nothing is ever added to the wrong one: a
reader that starts anywhere, or has lost a line, goes on with the next whole one.
"""

from __future__ import annotations

import operator
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from trainfast_runner.records.json_lines import NotYet, Tail, rest_of
from trainfast_runner.records.tick import DeviceReading, HostReading, Tick

T = TypeVar("T")

WHOLE_EVERY = 30
"""Lines from one whole tick to the next, where not all are: half a minute at a tick a second."""
WHOLE_FIRST = 600
"""So many lines are whole: ten minutes, with eight GPUs 7 MB; most runs are shorter."""


_ROW = operator.attrgetter(*DeviceReading.__struct_fields__)
_MARK = b'"since_ns":'
"""What no whole tick holds: inside of a text its quotes would stand behind backslashes."""


class TickChange(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a tick has that the line before has not. What is not named is unchanged, null is a reading that is gone.

    `columns` is by field of `DeviceReading`: a list has the value of each device, in the order of the whole tick;
    an object those that changed, by place in it.
    """

    t_ns: int
    since_ns: int
    """`t_ns` of the line this one builds on."""
    sample_us: int
    nvml_us: int | None
    host: dict[str, Any] = {}
    """Fields of `HostReading`; those of `run` likewise only where they changed."""
    columns: dict[str, list[Any] | dict[int, Any]] = {}
    missing: dict[str, str | None] = {}


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


class TickDecoder(Generic[T]):
    """Turns lines back into whole ticks, as `type`: `Tick`, or a struct with some of its fields."""

    def __init__(self, type: type[T]) -> None:
        self._type = type
        self._of_whole = msgspec.json.Decoder(type)
        self._of_change = msgspec.json.Decoder(TickChange)
        self._whole: bytes | dict[str, Any] | None = None
        """The newest tick as JSON has it; as the line it came in until a change needs more."""
        self._has_begun = False

    def decode(self, line: bytes) -> T:
        """The tick of this line.

        Raises NotYet before the first whole line; msgspec.DecodeError for damage, and for what builds on a line that
        is not there.
        """
        whole, self._whole = self._whole, None
        if _MARK not in line:
            tick = self._of_whole.decode(line)
            self._whole, self._has_begun = line, True
            return tick
        change = self._of_change.decode(line)
        if not self._has_begun:
            raise NotYet
        found = msgspec.json.decode(whole) if isinstance(whole, bytes) else whole
        if found is None or found.get("t_ns") != change.since_ns:
            raise msgspec.ValidationError("the line that this one builds on is not there")
        _apply(change, found)
        tick = msgspec.convert(found, self._type)
        self._whole = found
        return tick


def telemetry_tail(path: Path, type: type[T]) -> Tail[T]:
    """Follows a telemetry file, each line a whole tick as `type`."""
    return Tail(path, type, decoder=TickDecoder(type))


def read_ticks(path: Path) -> tuple[list[Tick], int]:
    """Every readable tick of a file, and how many lines could not be read."""
    tail = telemetry_tail(path, Tick)
    return list(rest_of(tail)), tail.unreadable


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


def _apply(change: TickChange, whole: dict[str, Any]) -> None:
    """Bring a whole tick, as JSON has it, up to date. Raises ValidationError where the two do not fit together."""
    try:
        whole |= {"t_ns": change.t_ns, "sample_us": change.sample_us, "nvml_us": change.nvml_us}
        run = whole["host"].get("run")
        whole["host"] |= change.host
        if run is not None and change.host.get("run") is not None:
            whole["host"]["run"] = run | change.host["run"]
        for key, words in change.missing.items():
            whole["missing"][key] = words
            if words is None:
                del whole["missing"][key]
        devices = whole["devices"]
        for name, column in change.columns.items():
            if isinstance(column, dict):
                for place, value in column.items():
                    devices[place][name] = value
            else:
                for device, value in zip(devices, column, strict=True):
                    device[name] = value
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise msgspec.ValidationError(f"these changes do not fit the line they build on: {error!r}") from None

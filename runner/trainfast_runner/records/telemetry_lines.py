"""The lines of `telemetry.jsonl`: one whole tick each, and in a long run an even share of the older ones.

Runs of earlier versions have lines that hold only the changes since the line before; they are read, not written.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from trainfast_runner.records.json_lines import (
    DAMAGE,
    WINDOW_BYTES,
    NoRecord,
    Tail,
    remaining_records,
    write_atomically,
)
from trainfast_runner.records.regular_files import read_regular
from trainfast_runner.records.thinned import Thinned
from trainfast_runner.records.tick import Tick


class Timed(Protocol):
    """A record with its time."""

    @property
    def t_ns(self) -> int:
        """CLOCK_MONOTONIC nanoseconds."""


T = TypeVar("T", bound=Timed)

TELEMETRY_CAP_BYTES = 64 << 20
"""The cap of `telemetry.jsonl`: eight GPUs write 12 kB a tick, 45 MB an hour."""
_SECOND_NS = 1_000_000_000
_MARK = b'"since_ns":'
"""Mark of a line of changes; no other line holds it: inside a text its quotes would stand after backslashes."""


class _Moment(msgspec.Struct):
    t_ns: int


class TickChange(msgspec.Struct, frozen=True, kw_only=True):
    """The difference between a tick and the line before. Unnamed fields are unchanged, null is a reading that is gone.

    `columns` is by field of `DeviceReading`: a list has the value of each device, in the order of the whole tick;
    an object has the changed values by the device's index in that order.
    """

    t_ns: int
    since_ns: int
    """`t_ns` of the line before."""
    sample_us: int
    nvml_us: int | None
    host: dict[str, Any] = {}
    """Changed fields of `HostReading`, and of its `run` likewise."""
    columns: dict[str, list[Any] | dict[int, Any]] = {}
    missing: dict[str, str | None] = {}


class TelemetryTail(Tail[T]):
    """Follows a telemetry file, each line a whole tick as `type`; a thinned file gives no tick twice."""

    def __init__(self, path: Path, type: type[T], window_bytes: int = WINDOW_BYTES) -> None:
        """`type`: `Tick`, or a struct with some of its fields."""
        super().__init__(path, type, window_bytes)
        self._type = type
        self._change_decoder = msgspec.json.Decoder(TickChange)
        self._whole: bytes | dict[str, Any] | None = None
        """The newest tick as JSON has it; its line until a change needs more."""
        self._newest_ns: int | None = None

    def decode(self, line: bytes) -> T:
        """The tick of this line.

        Raises NoRecord before the first whole line, and for a tick read before the file was thinned;
        msgspec.DecodeError for damage, and for changes whose base line is missing.
        """
        whole, self._whole = self._whole, None
        if _MARK not in line:
            tick = super().decode(line)
            self._whole = line
            if self._newest_ns is not None and tick.t_ns <= self._newest_ns:
                raise NoRecord
        else:
            change = self._change_decoder.decode(line)
            if self._newest_ns is None:
                raise NoRecord
            decoded = msgspec.json.decode(whole) if isinstance(whole, bytes) else whole
            if decoded is None or decoded.get("t_ns") != change.since_ns:
                raise msgspec.ValidationError("the line before this one is missing")
            _apply(change, decoded)
            tick = msgspec.convert(decoded, self._type)
            self._whole = decoded
        self._newest_ns = tick.t_ns
        return tick


def read_ticks(path: Path) -> tuple[list[Tick], int]:
    """Every readable tick of a file, and how many lines could not be read."""
    tail = TelemetryTail(path, Tick)
    return list(remaining_records(tail)), tail.unreadable


def thin_telemetry(path: Path) -> int:
    """Halve the older half of a file's ticks, evenly over time; returns the `Thinned` level. Raises OSError."""
    lines = _file_lines(path)
    older = Thinned[bytes](len(lines) // 4)
    for line in lines[: len(lines) // 2]:
        _add(older, line)
    write_atomically(path, b"".join([*older.records(), *lines[len(lines) // 2 :]]))
    return older.level


def thin_evenly(path: Path, level: int) -> None:
    """Thin all ticks of an ended run to one level, so that medians weigh all its time alike. Raises OSError."""
    ticks = Thinned[bytes](sys.maxsize)
    for line in _file_lines(path):
        _add(ticks, line)
    ticks.thin_to(level)
    write_atomically(path, b"".join(ticks.records()))


def _file_lines(path: Path) -> list[bytes]:
    return read_regular(path).splitlines(keepends=True)


def _add(ticks: Thinned[bytes], line: bytes) -> None:
    try:
        ticks.add(msgspec.json.decode(line, type=_Moment).t_ns // _SECOND_NS, line)
    except DAMAGE:
        return


def _apply(change: TickChange, whole: dict[str, Any]) -> None:
    """Apply the changes to a whole tick as JSON has it. Raises ValidationError if they do not fit it."""
    try:
        whole |= {"t_ns": change.t_ns, "sample_us": change.sample_us, "nvml_us": change.nvml_us}
        run = whole["host"].get("run")
        whole["host"] |= change.host
        if run is not None and change.host.get("run") is not None:
            whole["host"]["run"] = run | change.host["run"]
        for key, reason in change.missing.items():
            whole["missing"][key] = reason
            if reason is None:
                del whole["missing"][key]
        devices = whole["devices"]
        for name, column in change.columns.items():
            if isinstance(column, dict):
                for index, value in column.items():
                    devices[index][name] = value
            else:
                for device, value in zip(devices, column, strict=True):
                    device[name] = value
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise msgspec.ValidationError(f"these changes do not fit the line before: {error!r}") from None

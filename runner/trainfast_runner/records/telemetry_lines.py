"""The lines of `telemetry.jsonl`: one whole tick each, and in a long run an even share of the older ones."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from trainfast_runner.records.json_lines import (
    DAMAGE,
    WINDOW_BYTES,
    NoRecord,
    Tail,
    Thinned,
    read_regular,
    remaining_records,
    write_atomically,
)
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


class _Moment(msgspec.Struct):
    t_ns: int


class TelemetryTail(Tail[T]):
    """Follows a telemetry file, each line a whole tick as `type`; a thinned file gives no tick twice."""

    def __init__(self, path: Path, type: type[T], window_bytes: int = WINDOW_BYTES) -> None:
        """`type`: `Tick`, or a struct with some of its fields."""
        super().__init__(path, type, window_bytes)
        self._newest_ns = -1

    def decode(self, line: bytes) -> T:
        """The tick of this line.

        Raises NoRecord for a tick read before the file was thinned, and msgspec.DecodeError for damage.
        """
        tick = super().decode(line)
        if tick.t_ns <= self._newest_ns:
            raise NoRecord
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

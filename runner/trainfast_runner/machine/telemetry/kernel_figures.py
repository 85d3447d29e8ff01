"""The machine's own figures from the kernel's files in /proc, see proc(5).

psutil has them all. But with cold caches, as at a tick a second, its calls take 0.6 ms together on two cores: it parses
memory twice, looks for every block device in /sys, and makes objects of each core's times, of which a workstation has
a hundred and more.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from trainfast_runner.machine.processes.stat import content

UNREADABLE = (OSError, ValueError, LookupError)
"""What the functions below raise where a file is missing, or is not as Linux writes it."""

_SECTOR_BYTES = 512
"""Of /proc/diskstats, whatever the device's own sectors are."""
_MEMORY = re.compile(rb"^(MemTotal|MemAvailable|SwapTotal|SwapFree): +(\d+) kB", re.MULTILINE)
_RECEIVED, _SENT = 0, 8
"""Columns of /proc/net/dev: bytes, counted from the colon."""


class Memory(NamedTuple):
    """Bytes. What is used is what no allocation could get: the total without what is available."""

    total: int
    available: int
    swap_used: int


class Flow(NamedTuple):
    """Bytes since boot: read and written, or received and sent."""

    inward: int
    outward: int


class CoreTimes(NamedTuple):
    """Clock ticks of one core since boot."""

    busy: int
    idle: int
    """Waiting for a disk counts as idle."""


def memory() -> Memory:
    """Of the whole machine."""
    found = {name: int(kib) * 1024 for name, kib in _MEMORY.findall(content("/proc/meminfo"))}
    total, available = found[b"MemTotal"], found[b"MemAvailable"]
    if not 0 < available <= total:
        raise ValueError("a machine with more memory than it has, or none")
    return Memory(total, available, found[b"SwapTotal"] - found[b"SwapFree"])


def core_times() -> dict[bytes, CoreTimes]:
    """By core, in order."""
    lines = content("/proc/stat").split(b"\nintr", 1)[0].split(b"\n")
    found: dict[bytes, CoreTimes] = {}
    for line in lines[1:]:
        # A guest's time is in that of its user already.
        name, *ticks = line.split()[:9]
        user, nice, system, idle, waiting, *interrupts = map(int, ticks)
        found[name] = CoreTimes(user + nice + system + sum(interrupts), idle + waiting)
    if not found:
        raise ValueError("a machine without cores")
    return found


def busy_percent(before: dict[bytes, CoreTimes], now: dict[bytes, CoreTimes]) -> list[float]:
    """Of each core, 0 to 100, between two looks; a core that was switched on since has none."""
    found: list[float] = []
    for name, times in now.items():
        if (earlier := before.get(name)) is None:
            continue
        # Waiting times may run backwards a little.
        busy, idle = max(0, times.busy - earlier.busy), max(0, times.idle - earlier.idle)
        found.append(round(100 * busy / (busy + idle), 1) if busy + idle else 0.0)
    return found


class Disks:
    """Storage devices, without their partitions, which are counted in them."""

    def __init__(self) -> None:
        self._is_whole: dict[bytes, bool] = {}

    def flow(self) -> Flow | None:
        """Read and written by all of them; None without any."""
        read, written, has_any = 0, 0, False
        for line in content("/proc/diskstats").splitlines():
            _, _, name, _, _, sectors_read, _, _, _, sectors_written, _ = line.split(None, 10)
            if name not in self._is_whole:
                self._is_whole[name] = Path("/sys/block", name.decode().replace("/", "!")).exists()
            if self._is_whole[name]:
                read, written, has_any = read + int(sectors_read), written + int(sectors_written), True
        return Flow(read * _SECTOR_BYTES, written * _SECTOR_BYTES) if has_any else None


def network() -> Flow | None:
    """Received and sent by all interfaces but loopback, which carries gloo and local sockets; None without any."""
    received, sent, has_any = 0, 0, False
    for line in content("/proc/net/dev").splitlines()[2:]:
        name, _, figures = line.rpartition(b":")
        if name.strip() != b"lo":
            columns = figures.split()
            received, sent, has_any = received + int(columns[_RECEIVED]), sent + int(columns[_SENT]), True
    return Flow(received, sent) if has_any else None

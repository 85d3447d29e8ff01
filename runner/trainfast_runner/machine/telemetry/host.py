"""The machine around the GPUs, by psutil, and one run's process tree, summed, from `/proc/PID/stat`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any, TypeVar

import psutil

from trainfast_runner.machine.processes import Stat, processes_below, read_stat
from trainfast_runner.machine.telemetry.binding import refusal
from trainfast_runner.records.tick import HostReading, RunReading

SEARCH_EVERY = 3
"""Ticks between two searches for new descendants, which list all of /proc."""
_ALL_AGAIN_EVERY = 20
"""Searches between two that read every process: meanwhile a known pid may have passed to a new process."""


class ProcessTree:
    """Follows a process tree. A process that was a descendant once stays in the tree until it ends.

    Ranks whose launcher died are adopted by another process, and still belong to the run.
    """

    def __init__(self, root_pid: int) -> None:
        self.root_pid = root_pid
        self._ticks = 0
        self._members: dict[int, Stat] = {}
        """Each process as it was read last."""
        self._seen_pids: set[int] = set()
        """Every pid of the last search, whose parents need no second look."""
        self._read_s: float | None = None
        root = read_stat(root_pid)
        if root is not None and not root.ended:
            self._members[root_pid] = root

    def read(self) -> RunReading:
        """The sums at this moment; the first has no `cpu_percent`. Raises ProcessLookupError once no process is left.

        Raises another OSError when files cannot be opened.
        """
        if self._ticks % SEARCH_EVERY == 0:
            self._search(everyone=self._ticks % (SEARCH_EVERY * _ALL_AGAIN_EVERY) == 0)
        self._ticks += 1
        now_s = time.monotonic()
        before_s, self._read_s = self._read_s, now_s
        members, cpu_s = dict[int, Stat](), 0.0
        for pid, member in self._members.items():
            stat = read_stat(pid)
            # A zombie uses nothing, and the pid may have passed to another process.
            if stat is not None and not stat.ended and stat.start_ticks == member.start_ticks:
                cpu_s += stat.cpu_s - member.cpu_s
                members[pid] = stat
        self._members = members  # an OSError above leaves those of the last tick
        if not members:
            raise ProcessLookupError(f"process {self.root_pid} and its children have ended")
        stats = members.values()
        return RunReading(
            cpu_percent=None if before_s is None else round(100 * cpu_s / (now_s - before_s), 1),
            memory_rss_bytes=sum(stat.memory_rss_bytes for stat in stats),
            processes=len(stats),
            threads=sum(stat.threads for stat in stats),
        )

    def _search(self, *, everyone: bool) -> None:
        """Add new descendants, reading `everyone` or only the processes that the last search did not see."""
        pids = {*psutil.pids()}
        unseen = pids if everyone else pids - self._seen_pids
        self._seen_pids = pids
        # From every member: processes below an adopted rank are no longer below the root.
        below = processes_below(self._members, unseen)
        self._members = {pid: stat for pid, stat in below.items() if not stat.ended} | self._members


_T = TypeVar("_T")
UNREADABLE = (OSError, ValueError, LookupError, psutil.Error, NotImplementedError)
"""Errors of a reading that the system does not give."""
SPARSE_EVERY = 5
"""Ticks between two readings of what costs most: the sensors and swap."""
_PACKAGE_SENSORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal", "acpitz")
"""Kernel drivers that measure the processor itself, best first."""
BLOCK_DEVICES = "/sys/block"
"""A folder for each whole block device; the kernel's own (LVM, LUKS, md, loop) have no `device` in it."""


class HostReader:
    """Reads the host once a tick. Use it from one thread: rates are since its last reading, so the first has none."""

    def __init__(self) -> None:
        self.tree: ProcessTree | None = None
        """The run's processes, or None when no run is watched."""
        self._ticks = 0
        self._disks = whole_disks()
        self._cores = os.cpu_count()
        self._times: tuple[float, float] | None = None
        self._sparse: dict[str, Any] = {}
        self._sparse_missing: dict[str, str] = {}
        """The values of the last sparse reading, and the reasons that it left parts out."""

    def read(self) -> tuple[HostReading, dict[str, str]]:
        """The reading, and the reason for each missing part (keys start with `host.`, or are `run`)."""
        if self._ticks % SPARSE_EVERY == 0:
            missing = self._sparse_missing
            missing.pop("host.swap_used_bytes", None)
            self._sparse = {"swap_used_bytes": _ask("host.swap_used_bytes", lambda: psutil.swap_memory().used, missing)}
            # A machine without a sensor gets none later, and each search costs as much as all other readings.
            if "host.temperature_c" not in missing:
                self._sparse["temperature_c"] = _ask("host.temperature_c", _package_temperature, missing)
        self._ticks += 1
        missing = dict(self._sparse_missing)
        before, self._times = self._times, _ask("host.cpu_percent", _busy_and_idle_s, missing)
        if before is None and self._times is not None:
            missing["host.cpu_percent"] = "a rate needs two readings: it comes with the next one"
        counters = {
            **(_ask("host.memory_used_bytes", _read_memory, missing) or {}),
            **(_ask("host.disk_read_bytes", lambda: read_disks(self._disks), missing) or {}),
            **(_ask("host.network_received_bytes", _read_network, missing) or {}),
        }
        reading = HostReading(
            cpu_percent=None if before is None or self._times is None else _busy_percent(before, self._times),
            cpu_count=self._cores,
            load_1m=_ask("host.load_1m", lambda: os.getloadavg()[0], missing),
            run=None if self.tree is None else _ask("run", self.tree.read, missing),
            **self._sparse,
            **counters,
        )
        return reading, missing


def _package_temperature() -> float:
    """The hottest reading of the best processor sensor, in degrees Celsius."""
    sensors: dict[str, list[Any]] = psutil.sensors_temperatures()
    for name in _PACKAGE_SENSORS:
        degrees = [float(sensor.current) for sensor in sensors.get(name, ())]
        if possible := [value for value in degrees if refusal("temperature_c", value) is None]:
            return max(possible)
    raise LookupError("no processor temperature sensor is visible")


def _ask(key: str, call: Callable[[], _T], missing: dict[str, str]) -> _T | None:
    """The call's answer; None, with the reason in `missing`, if the system refuses or has none."""
    try:
        return call()
    except (LookupError, ProcessLookupError) as absent:
        missing[key] = str(absent)
    except UNREADABLE as error:
        missing[key] = f"the system does not give this reading: {error}"
    return None


def busy_and_idle_s(core: Any) -> tuple[float, float]:
    """Seconds since boot that a core, or all of them, was busy and idle; waiting for a disk counts as idle."""
    # A guest's time is in that of its user already (proc_stat(5)).
    busy_s = core.user + core.nice + core.system + core.irq + core.softirq + core.steal
    return busy_s, core.idle + core.iowait


def _busy_and_idle_s() -> tuple[float, float]:
    return busy_and_idle_s(psutil.cpu_times())


def _busy_percent(before: tuple[float, float], after: tuple[float, float]) -> float:
    """Percent of the time that the cores were busy between two readings, 0 to 100."""
    # The kernel may set waiting times back a little (proc(5)).
    busy_s, idle_s = (max(0.0, now - then) for then, now in zip(before, after, strict=True))
    return round(100 * busy_s / (busy_s + idle_s), 2) if busy_s + idle_s else 0.0


def _read_memory() -> dict[str, int]:
    """Memory at this moment, by field of `HostReading`."""
    memory = psutil.virtual_memory()
    return {
        "memory_used_bytes": memory.total - memory.available,
        "memory_total_bytes": memory.total,
        "memory_available_bytes": memory.available,
    }


def whole_disks() -> frozenset[str]:
    """The names of all whole disks, without partitions and what the kernel makes on top; empty if not listed."""
    with suppress(OSError):
        names = os.listdir(BLOCK_DEVICES)
        return frozenset(name.replace("!", "/") for name in names if os.path.exists(f"{BLOCK_DEVICES}/{name}/device"))
    return frozenset()


def read_disks(names: Collection[str]) -> dict[str, int]:
    """Bytes that these disks have read and written since boot, by field of `HostReading`.

    A partition, and a device that the kernel makes on top, counts the same bytes as its disk.
    """
    counters = psutil.disk_io_counters(perdisk=True, nowrap=False)
    disks = [(disk.read_bytes, disk.write_bytes) for name, disk in counters.items() if name in names]
    return _sums(("disk_read_bytes", "disk_write_bytes"), disks, "no disk")


def _read_network() -> dict[str, int]:
    """Bytes received and sent by all interfaces but loopback, which carries gloo and local sockets."""
    counters = psutil.net_io_counters(pernic=True, nowrap=False)
    cards = [(card.bytes_recv, card.bytes_sent) for name, card in counters.items() if name != "lo"]
    return _sums(("network_received_bytes", "network_sent_bytes"), cards, "no network interface but loopback")


def _sums(names: tuple[str, str], pairs: list[tuple[int, int]], absent: str) -> dict[str, int]:
    if not pairs:
        raise LookupError(absent)
    return dict(zip(names, map(sum, zip(*pairs, strict=True)), strict=True))

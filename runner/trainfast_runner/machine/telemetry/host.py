"""The machine around the GPUs, by psutil, and one run's process tree, summed, from `/proc/PID/stat`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import psutil

from trainfast_runner.machine.processes import Stat, read_stat, read_storage_bytes
from trainfast_runner.machine.telemetry.plausible import refusal
from trainfast_runner.records.tick import HostReading, RunReading

SEARCH_EVERY = 3
"""Ticks between two searches for new descendants, which list all of /proc; also between two readings of the storage
counters, which are in a file for each process."""
_ALL_AGAIN_EVERY = 20
"""Searches between two that read every process: meanwhile a known pid may have passed to a new process."""


@dataclass
class _Member:
    """A process of the tree, its processor time and its last storage counters (None when the system gives none)."""

    start_ticks: int
    cpu_s: float
    storage: tuple[int, int] | None = None


class ProcessTree:
    """Follows a process tree. A process that was a descendant once stays in the tree until it ends.

    Ranks whose launcher died are adopted by another process, and still belong to the run.
    """

    def __init__(self, root_pid: int) -> None:
        self.root_pid = root_pid
        self._ticks = 0
        self._members: dict[int, _Member] = {}
        self._seen_pids: set[int] = set()
        """Every pid of the last search, whose parents need no second look."""
        self._read_s: float | None = None
        self._ended_read_bytes = 0
        self._ended_write_bytes = 0
        root = read_stat(root_pid)
        if root is not None and not root.ended:
            self._add(root_pid, root)

    def read(self) -> RunReading | None:
        """The sums at this moment; None once no process is left. The first has no `cpu_percent`.

        Raises OSError when files cannot be opened.
        """
        turn = self._ticks % SEARCH_EVERY
        if turn == 0:
            self._search(everyone=self._ticks % (SEARCH_EVERY * _ALL_AGAIN_EVERY) == 0)
        storage_due = turn == SEARCH_EVERY // 2
        self._ticks += 1
        now_s = time.monotonic()
        before_s, self._read_s = self._read_s, now_s
        cpu_s, rss_bytes, threads = 0.0, 0, 0
        for pid, member in list(self._members.items()):
            stat = read_stat(pid)
            if stat is None or stat.ended or stat.start_ticks != member.start_ticks:
                # A zombie uses nothing, and the pid may have passed to another process.
                self._retire(pid)
                continue
            cpu_s += stat.cpu_s - member.cpu_s
            member.cpu_s = stat.cpu_s
            rss_bytes += stat.memory_rss_bytes
            threads += stat.threads
            if storage_due or member.storage is None:
                # A process that just ended keeps its last counters.
                member.storage = read_storage_bytes(pid) or member.storage
        if not self._members:
            return None
        storage = [member.storage for member in self._members.values() if member.storage is not None]
        return RunReading(
            cpu_percent=None if before_s is None else round(100 * cpu_s / (now_s - before_s), 1),
            memory_rss_bytes=rss_bytes,
            read_bytes=self._ended_read_bytes + sum(read for read, _ in storage) if storage else None,
            write_bytes=self._ended_write_bytes + sum(written for _, written in storage) if storage else None,
            processes=len(self._members),
            threads=threads,
        )

    def _search(self, *, everyone: bool) -> None:
        """Add new descendants, reading `everyone` or only the processes that the last search did not see."""
        pids = set(psutil.pids())
        unseen = pids if everyone else pids - self._seen_pids
        self._seen_pids = pids
        children: dict[int, list[tuple[int, Stat]]] = {}
        for pid in unseen:
            if (stat := read_stat(pid)) is not None and not stat.ended:
                children.setdefault(stat.parent_pid, []).append((pid, stat))
        # Start from every member: processes below an adopted rank are no longer below the root.
        parents = list(self._members)
        while parents:
            for pid, stat in children.get(parents.pop(), ()):
                if pid not in self._members:
                    self._add(pid, stat)
                    parents.append(pid)

    def _add(self, pid: int, stat: Stat) -> None:
        self._members[pid] = _Member(stat.start_ticks, stat.cpu_s)

    def _retire(self, pid: int) -> None:
        read, written = self._members.pop(pid).storage or (0, 0)
        self._ended_read_bytes += read
        self._ended_write_bytes += written


_T = TypeVar("_T")
UNREADABLE = (OSError, ValueError, LookupError, psutil.Error, NotImplementedError)
"""Errors of a reading that the system does not give."""

SPARSE_EVERY = 5
"""Ticks between two readings of what costs most: the sensors, swap, and the list of disks."""
_NO_SENSOR = "no processor temperature sensor is visible"
_PACKAGE_SENSORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal", "acpitz")
"""Kernel drivers that measure the processor itself, best first."""
_NO_NETWORK = "no network interface but loopback"
BLOCK_DEVICES = "/sys/block"
"""A folder for each whole block device; the kernel's own (LVM, LUKS, md, loop) have no `device` in it."""


class HostReader:
    """Reads the host once a tick. Rates need two readings, so the first one has no `cpu_percent`."""

    def __init__(self) -> None:
        self.tree: ProcessTree | None = None
        """The run's processes, or None when no run is watched."""
        self._ticks = 0
        self._has_sensor = True
        self._temperature_c: float | None = None
        self._swap_used_bytes: int | None = None
        self._disks: frozenset[str] = frozenset()
        self._sparse_missing: dict[str, str] = {}
        """The reasons that the last sparse reading left parts out."""
        self._cores: list[CoreSeconds] | None = None

    def read(self) -> tuple[HostReading, dict[str, str]]:
        """The reading, and the reason for each missing part (keys start with `host.`, or are `run`)."""
        if self._ticks % SPARSE_EVERY == 0:
            self._read_sparse()
        missing = dict(self._sparse_missing)
        per_core = self._per_core(missing)
        counters = {
            **(_ask("host.memory_used_bytes", read_memory, missing) or {}),
            **(_ask("host.disk_read_bytes", partial(read_disks, self._disks), missing, none="no disk") or {}),
            **(_ask("host.network_received_bytes", read_network, missing, none=_NO_NETWORK) or {}),
        }
        load = _ask("host.load_1m", os.getloadavg, missing)
        run = None
        if self.tree:
            none = f"process {self.tree.root_pid} and its children have ended"
            run = _ask("run", self.tree.read, missing, none=none)
        reading = HostReading(
            cpu_percent=round(sum(per_core) / len(per_core), 2) if per_core else None,
            cpu_count=len(self._cores) if self._cores else None,
            cpu_percent_per_core=per_core,
            load_1m=load[0] if load else None,
            temperature_c=self._temperature_c,
            swap_used_bytes=self._swap_used_bytes,
            run=run,
            **counters,
        )
        self._ticks += 1
        return reading, missing

    def _read_sparse(self) -> None:
        missing: dict[str, str] = {"host.temperature_c": _NO_SENSOR}
        if self._has_sensor:
            del missing["host.temperature_c"]
            self._temperature_c = _ask("host.temperature_c", _package_temperature, missing, none=_NO_SENSOR)
            # A machine without a sensor gets none later, and each search costs as much as all other readings.
            self._has_sensor = self._temperature_c is not None or self._ticks > 0
        self._swap_used_bytes = _ask("host.swap_used_bytes", lambda: int(psutil.swap_memory().used), missing)
        self._disks = _ask("host.disk_read_bytes", whole_disks, missing) or frozenset()
        self._sparse_missing = missing

    def _per_core(self, missing: dict[str, str]) -> list[float] | None:
        previous_cores = self._cores
        cores = _ask("host.cpu_percent", read_cores, missing)
        self._cores = cores
        if cores is None:
            return None
        if previous_cores is None or len(previous_cores) != len(cores):  # a core was switched on or off
            missing["host.cpu_percent"] = "a rate needs two readings: it comes with the next one"
            return None
        return busy_percent(previous_cores, cores)


def busy_percent(before: Sequence[CoreSeconds], after: Sequence[CoreSeconds]) -> list[float]:
    """Percent of the time that each core was busy between two readings, 0 to 100."""
    percents: list[float] = []
    for earlier, later in zip(before, after, strict=True):
        # The kernel may set waiting times back a little (proc(5)).
        busy_s = max(0.0, later.busy - earlier.busy)
        idle_s = max(0.0, later.idle - earlier.idle)
        percents.append(round(100 * busy_s / (busy_s + idle_s), 1) if busy_s + idle_s else 0.0)
    return percents


def _package_temperature() -> float | None:
    """The hottest reading of the best processor sensor, in degrees Celsius."""
    sensors: dict[str, list[Any]] = psutil.sensors_temperatures()
    for name in _PACKAGE_SENSORS:
        degrees = [float(sensor.current) for sensor in sensors.get(name, ())]
        if possible := [value for value in degrees if refusal("temperature_c", value) is None]:
            return max(possible)
    return None


def _ask(
    key: str, call: Callable[[], _T | None], missing: dict[str, str], *, none: str = "no such reading"
) -> _T | None:
    """The call's answer; None, with the reason in `missing`, if the system refuses or has none."""
    try:
        answer = call()
    except UNREADABLE as error:
        missing[key] = f"the system does not give this reading: {error}"
        return None
    if answer is None:
        missing[key] = none
    return answer


class CoreSeconds(NamedTuple):
    """Seconds of one core since boot; waiting for a disk counts as idle."""

    busy: float
    idle: float


def read_cores() -> list[CoreSeconds]:
    """Busy and idle seconds of each core, in order. Raises one of `UNREADABLE`."""
    return [
        # A guest's time is in that of its user already (proc_stat(5)).
        CoreSeconds(core.user + core.nice + core.system + core.irq + core.softirq + core.steal, core.idle + core.iowait)
        for core in psutil.cpu_times(percpu=True)
    ]


def read_memory() -> dict[str, int]:
    """Memory at this moment, by field of `HostReading`. Raises as `read_cores`."""
    memory = psutil.virtual_memory()
    return {
        "memory_used_bytes": memory.total - memory.available,
        "memory_total_bytes": memory.total,
        "memory_available_bytes": memory.available,
    }


def whole_disks() -> frozenset[str]:
    """The names of all whole disks, without partitions and what the kernel makes on top. Raises as `read_cores`."""
    names = os.listdir(BLOCK_DEVICES)
    return frozenset(name.replace("!", "/") for name in names if os.path.exists(f"{BLOCK_DEVICES}/{name}/device"))


def read_disks(names: Collection[str]) -> dict[str, int] | None:
    """Bytes that these disks have read and written since boot, by field of `HostReading`; None without a disk.

    A partition, and a device that the kernel makes on top, counts the same bytes as its disk. Raises as `read_cores`.
    """
    counters = psutil.disk_io_counters(perdisk=True, nowrap=False)
    disks = [counted for name, counted in counters.items() if name in names]
    if not disks:
        return None
    return {
        "disk_read_bytes": sum(disk.read_bytes for disk in disks),
        "disk_write_bytes": sum(disk.write_bytes for disk in disks),
    }


def read_network() -> dict[str, int] | None:
    """Bytes received and sent by all interfaces but loopback, by field of `HostReading`; None without any.

    Loopback carries gloo and local sockets. Raises as `read_cores`.
    """
    counters = psutil.net_io_counters(pernic=True, nowrap=False)
    interfaces = [counted for name, counted in counters.items() if name != "lo"]
    if not interfaces:
        return None
    return {
        "network_received_bytes": sum(interface.bytes_recv for interface in interfaces),
        "network_sent_bytes": sum(interface.bytes_sent for interface in interfaces),
    }

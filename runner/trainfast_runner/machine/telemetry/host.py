"""The machine around the GPUs, by psutil, and one run's process tree, summed, from `/proc/PID/stat`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
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

    def read(self) -> RunReading:
        """The sums at this moment; the first has no `cpu_percent`. Raises ProcessLookupError once no process is left.

        Raises another OSError when files cannot be opened.
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
            raise ProcessLookupError(f"process {self.root_pid} and its children have ended")
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
"""Ticks between two readings of what costs most: the sensors and swap."""
_NO_SENSOR = "no processor temperature sensor is visible"
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
        self._cores: list[CoreSeconds] = []
        self._sparse: tuple[dict[str, Any], dict[str, str]] = ({}, {})
        """The values of the last sparse reading, and the reasons that it left parts out."""

    def read(self) -> tuple[HostReading, dict[str, str]]:
        """The reading, and the reason for each missing part (keys start with `host.`, or are `run`)."""
        if self._ticks % SPARSE_EVERY == 0:
            self._sparse = self._read_sparse()
        sparse, sparse_missing = self._sparse
        missing = dict(sparse_missing)
        before, self._cores = self._cores, _ask("host.cpu_percent", read_cores, missing) or []
        per_core = None
        if len(before) == len(self._cores):
            per_core = [_busy_percent(*cores) for cores in zip(before, self._cores, strict=True)]
        elif self._cores:  # the first reading, or a core was switched on or off
            missing["host.cpu_percent"] = "a rate needs two readings: it comes with the next one"
        counters = {
            **(_ask("host.memory_used_bytes", read_memory, missing) or {}),
            **(_ask("host.disk_read_bytes", partial(read_disks, self._disks), missing) or {}),
            **(_ask("host.network_received_bytes", read_network, missing) or {}),
        }
        load = _ask("host.load_1m", os.getloadavg, missing)
        self._ticks += 1
        reading = HostReading(
            cpu_percent=round(sum(per_core) / len(per_core), 2) if per_core else None,
            cpu_count=len(self._cores) or None,
            cpu_percent_per_core=per_core or None,
            load_1m=load[0] if load else None,
            run=None if self.tree is None else _ask("run", self.tree.read, missing),
            **sparse,
            **counters,
        )
        return reading, missing

    def _read_sparse(self) -> tuple[dict[str, Any], dict[str, str]]:
        missing: dict[str, str] = {}
        swap_used_bytes = _ask("host.swap_used_bytes", lambda: int(psutil.swap_memory().used), missing)
        values, no_sensor = self._sparse
        if "host.temperature_c" in no_sensor:
            # A machine without a sensor gets none later, and each search costs as much as all other readings.
            missing["host.temperature_c"] = no_sensor["host.temperature_c"]
            return {**values, "swap_used_bytes": swap_used_bytes}, missing
        temperature_c = _ask("host.temperature_c", _package_temperature, missing)
        return {"temperature_c": temperature_c, "swap_used_bytes": swap_used_bytes}, missing


def _package_temperature() -> float:
    """The hottest reading of the best processor sensor, in degrees Celsius."""
    sensors: dict[str, list[Any]] = psutil.sensors_temperatures()
    for name in _PACKAGE_SENSORS:
        degrees = [float(sensor.current) for sensor in sensors.get(name, ())]
        if possible := [value for value in degrees if refusal("temperature_c", value) is None]:
            return max(possible)
    raise _Absent(_NO_SENSOR)


class _Absent(Exception):
    """Raised for a reading that this machine does not have; the text is the reason."""


def _ask(key: str, call: Callable[[], _T], missing: dict[str, str]) -> _T | None:
    """The call's answer; None, with the reason in `missing`, if the system refuses or has none."""
    try:
        return call()
    except (_Absent, ProcessLookupError) as absent:
        missing[key] = str(absent)
    except UNREADABLE as error:
        missing[key] = f"the system does not give this reading: {error}"
    return None


class CoreSeconds(NamedTuple):
    """Seconds of one core since boot; waiting for a disk counts as idle."""

    busy: float
    idle: float


def read_cores() -> list[CoreSeconds]:
    """Busy and idle seconds of each core, in order. psutil's own percentages take a millisecond for 128 cores."""
    return [
        # A guest's time is in that of its user already (proc_stat(5)).
        CoreSeconds(core.user + core.nice + core.system + core.irq + core.softirq + core.steal, core.idle + core.iowait)
        for core in psutil.cpu_times(percpu=True)
    ]


def _busy_percent(before: CoreSeconds, after: CoreSeconds) -> float:
    """Percent of the time that a core was busy between two readings, 0 to 100."""
    # The kernel may set waiting times back a little (proc(5)).
    busy_s, idle_s = max(0.0, after.busy - before.busy), max(0.0, after.idle - before.idle)
    return round(100 * busy_s / (busy_s + idle_s), 1) if busy_s + idle_s else 0.0


def read_memory() -> dict[str, int]:
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
    return _summed(
        [counted for name, counted in counters.items() if name in names],
        "no disk",
        disk_read_bytes="read_bytes",
        disk_write_bytes="write_bytes",
    )


def read_network() -> dict[str, int]:
    """Bytes received and sent by all interfaces but loopback, which carries gloo and local sockets."""
    counters = psutil.net_io_counters(pernic=True, nowrap=False)
    return _summed(
        [counted for name, counted in counters.items() if name != "lo"],
        "no network interface but loopback",
        network_received_bytes="bytes_recv",
        network_sent_bytes="bytes_sent",
    )


def _summed(counted: Sequence[Any], none: str, **attributes: str) -> dict[str, int]:
    """The sum of each attribute, by field of `HostReading`; `none` is the reason for no counters."""
    if not counted:
        raise _Absent(none)
    return {field: sum(getattr(one, attribute) for one in counted) for field, attribute in attributes.items()}

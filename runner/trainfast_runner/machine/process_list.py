"""Processes that use the machine, with owner, memory, command, age and GPU memory, and the end of a selected one."""

from __future__ import annotations

import heapq
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import psutil

from trainfast_runner.machine.processes import TICKS_PER_S, Identity, Stat, read_stat, sees_host_pids
from trainfast_runner.records.tick import DeviceReading

KERNEL_THREADS_PARENT = 2
MIN_CPU_PERCENT = 1.0
MIN_RSS_BYTES = 32 << 20
"""Least memory, and least CPU percent, of a listed process that holds no GPU: one of the two is enough."""
SCAN_EVERY_S = 2.0
SCAN_SHARE = 0.01
"""Share of a core that looking at all processes may take."""
MAX_ROWS = 200
"""The most processes in a list."""
COMMAND_BYTES = 4096
"""The beginning of a command line that is read: more than a screen shows."""


@dataclass(frozen=True, slots=True)
class ProcessRow:
    """One process. `identity` is None when it cannot be seen from here, as from inside a container."""

    pid: int
    identity: Identity | None = None
    owner: str | None = None
    is_own: bool = False
    """True if the process belongs to this user."""
    command: str = ""
    """The command line, untrusted text."""
    cpu_percent: float | None = None
    """100 is one core kept busy; None until it was seen twice."""
    memory_rss_bytes: int | None = None
    age_s: float | None = None
    devices: tuple[tuple[int, int | None], ...] = ()
    """The GPUs on which the process has a context, by index, with the bytes held there."""

    @property
    def device_memory_bytes(self) -> int | None:
        """Bytes held on all GPUs together; None when the driver does not list them."""
        readings = [used_bytes for _, used_bytes in self.devices if used_bytes is not None]
        return sum(readings) if readings else None


class ProcessList:
    """Reads /proc every few seconds; use it from one thread."""

    def __init__(self) -> None:
        self._pids_are_ours = sees_host_pids()
        """True if the driver lists ids as in /proc."""
        self._cpu_s: dict[Identity, float] = {}
        """The processor time of each process at the last scan."""
        self._scanned_s = 0.0
        self._rows: dict[int, ProcessRow] = {}
        self._next_scan_s = 0.0
        self._looked_for: frozenset[int] = frozenset()
        """Processes on GPUs that the last scan looked for; those it did not find are hidden, or have ended."""

    def read(self, devices: Sequence[DeviceReading]) -> tuple[ProcessRow, ...]:
        """The processes on the GPUs of a tick, and those that keep the host busy or fill its memory."""
        devices_by_pid: dict[int, list[tuple[int, int | None]]] = {}
        for device in devices:
            for process in device.processes or ():
                devices_by_pid.setdefault(process.pid, []).append((device.index, process.memory_used_bytes))
        began_s = time.monotonic()
        if began_s >= self._next_scan_s or (self._pids_are_ours and not devices_by_pid.keys() <= self._looked_for):
            self._looked_for = frozenset(devices_by_pid) if self._pids_are_ours else frozenset()
            self._scan(self._looked_for)
            self._next_scan_s = began_s + max(SCAN_EVERY_S, (time.monotonic() - began_s) / SCAN_SHARE)
        rows_without_gpu = dict(self._rows)
        rows_on_gpus = []
        for pid, held_on in devices_by_pid.items():
            # In a container the driver's id may be that of an unrelated process here: both are listed.
            scanned = rows_without_gpu.pop(pid, None) if self._pids_are_ours else None
            rows_on_gpus.append(replace(scanned or ProcessRow(pid), devices=tuple(held_on)))
        # A driver may list thousands; those that hold most are the ones a person looks for.
        rows = (*rows_without_gpu.values(), *rows_on_gpus)
        return rows if len(rows) <= MAX_ROWS else tuple(heapq.nlargest(MAX_ROWS, rows, key=_weight))

    def _scan(self, gpu_pids: frozenset[int]) -> None:
        now_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        since_s, self._scanned_s = now_s - self._scanned_s, now_s
        cpu_s_before, self._cpu_s = self._cpu_s, {}
        self._rows = {}
        for pid in psutil.pids():
            stat = _running(pid)
            if stat is None or KERNEL_THREADS_PARENT in (pid, stat.parent_pid):
                continue
            identity = Identity(pid, stat.start_ticks)
            self._cpu_s[identity] = stat.cpu_s
            before_s = cpu_s_before.get(identity)
            cpu_percent = None if before_s is None or since_s <= 0 else 100 * (stat.cpu_s - before_s) / since_s
            rss_bytes = stat.memory_rss_bytes
            if pid in gpu_pids or rss_bytes >= MIN_RSS_BYTES or (cpu_percent or 0) >= MIN_CPU_PERCENT:
                owner, is_own = owner_of(pid) or (None, False)
                command = command_line(pid) or f"[{stat.name}]"
                age_s = max(0.0, now_s - stat.start_ticks / TICKS_PER_S)
                self._rows[pid] = ProcessRow(pid, identity, owner, is_own, command, cpu_percent, rss_bytes, age_s)


def _weight(row: ProcessRow) -> tuple[bool, int, float, int]:
    device_bytes = row.device_memory_bytes or 0
    return (bool(row.devices), device_bytes, row.cpu_percent or 0.0, row.memory_rss_bytes or 0)


def _running(pid: int) -> Stat | None:
    """The process's fields; None when it has ended, or cannot be read now."""
    try:
        stat = read_stat(pid)
    except OSError:
        return None
    return None if stat is None or stat.ended else stat


def owner_of(pid: int) -> tuple[str, bool] | None:
    """The name of a process's owner, and True if that is this user; None when it has ended or is hidden."""
    try:
        process = psutil.Process(pid)
        return process.username(), int(process.uids().real) == os.getuid()
    except psutil.Error:
        return None


def command_line(pid: int) -> str:
    """The command line, joined by spaces; empty when the process has ended or is hidden."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read(COMMAND_BYTES).rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""

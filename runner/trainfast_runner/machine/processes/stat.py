"""One process as `/proc/PID/stat` and `/proc/PID/io` describe it (proc_pid_stat(5), proc_pid_io(5)).

psutil gives start times in seconds since 1970; records name a process by its start in clock ticks. psutil also needs
six times as long for these fields, each tick for each process of a run (docs/decisions.md).
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from trainfast_runner.machine.proc_files import read_proc

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGESIZE")


@dataclass(frozen=True, slots=True)
class Stat:
    """Fields of `/proc/PID/stat`."""

    state: str
    """The kernel's letter: R runs, S sleeps, D sleeps and takes no signal, Z has ended."""
    parent_pid: int
    session: int
    start_ticks: int
    """Clock ticks since boot."""
    cpu_s: float
    """Seconds of processor time."""
    threads: int
    memory_rss_bytes: int
    name: str

    @property
    def ended(self) -> bool:
        """True if the process only waits to be collected."""
        return self.state in "ZXx"


def read_stat(pid: int) -> Stat | None:
    """The process's fields; None when it does not exist or is hidden. Raises OSError when files cannot be opened."""
    return _read_stat(f"{pid}/stat")


def read_threads(pid: int) -> list[Stat]:
    """The threads of a process, the main one first; empty when the process does not exist."""
    try:
        threads = sorted(os.listdir(f"/proc/{pid}/task"), key=int)
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return []
    return [stat for thread in threads if (stat := _read_stat(f"{pid}/task/{thread}/stat")) is not None]


def read_storage_bytes(pid: int) -> tuple[int, int] | None:
    """Bytes read from and written to storage; None for an ended or foreign process, or without kernel accounting."""
    try:
        counters = dict(line.split(b": ") for line in read_proc(f"{pid}/io").splitlines())
        return int(counters[b"read_bytes"]), int(counters[b"write_bytes"])
    except (OSError, LookupError, ValueError):
        return None


def _read_stat(name: str) -> Stat | None:
    try:
        text = read_proc(name)
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    # The name in parentheses may hold spaces and parentheses itself: count fields from the last one.
    head, _, after_name = text.rpartition(b")")
    fields = after_name.split(None, 22)
    return Stat(
        state=fields[0].decode(),
        parent_pid=int(fields[1]),
        session=int(fields[3]),
        start_ticks=int(fields[19]),
        cpu_s=(int(fields[11]) + int(fields[12])) / TICKS_PER_S,
        threads=int(fields[17]),
        memory_rss_bytes=int(fields[21]) * _PAGE_BYTES,
        name=head.partition(b"(")[2].decode(errors="replace"),
    )

"""One process in the kernel's words: `/proc/PID/stat` and `/proc/PID/io`, see proc_pid_stat(5), proc_pid_io(5)."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stat:
    """What `/proc/PID/stat` says of a process; `ended` of one that only waits to be collected.

    `state` is the kernel's letter: R runs, S sleeps, D sleeps and takes no signal, Z has ended.
    `start_ticks` and `cpu_ticks` are clock ticks since boot and of processor time, `rss_pages` pages of memory.
    """

    state: str
    parent_pid: int
    session: int
    start_ticks: int
    cpu_ticks: int
    threads: int
    rss_pages: int
    name: str

    @property
    def ended(self) -> bool:
        """True if the process only waits to be collected."""
        return self.state in "ZXx"


def content(path: str) -> bytes:
    """The whole of a file of the kernel's, which has no size before it is read. Raises OSError."""
    with open(path, "rb", buffering=0) as file:
        return file.readall()


def read_stat(pid: int) -> Stat | None:
    """None when there is no such process, or nobody may look at it. Raises OSError where files cannot be opened."""
    return _read(f"/proc/{pid}/stat")


def read_threads(pid: int) -> list[Stat]:
    """The threads of a process, the main one first; empty when there is no such process."""
    try:
        threads = sorted(os.listdir(f"/proc/{pid}/task"), key=int)
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return []
    return [stat for thread in threads if (stat := _read(f"/proc/{pid}/task/{thread}/stat")) is not None]


def _read(path: str) -> Stat | None:
    try:
        text = content(path)
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    # The name in parentheses may hold spaces and parentheses itself: count fields from the last one.
    head, _, rest = text.rpartition(b")")
    fields = rest.split(None, 22)
    return Stat(
        state=fields[0].decode(),
        parent_pid=int(fields[1]),
        session=int(fields[3]),
        start_ticks=int(fields[19]),
        cpu_ticks=int(fields[11]) + int(fields[12]),
        threads=int(fields[17]),
        rss_pages=int(fields[21]),
        name=head.partition(b"(")[2].decode(errors="replace"),
    )


def read_storage(pid: int) -> tuple[int, int] | None:
    """Bytes it had read from storage and written to it; None for an ended process, for most of other users, and from a
    kernel that does not count them."""
    try:
        text = content(f"/proc/{pid}/io")
    except OSError:
        return None
    found = dict(line.split(b": ", 1) for line in text.splitlines())
    if b"read_bytes" not in found:
        return None
    return int(found[b"read_bytes"]), int(found[b"write_bytes"])

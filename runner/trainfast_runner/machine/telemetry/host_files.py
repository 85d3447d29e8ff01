"""Memory, disks and network of the host, from files of `/proc`.

psutil reads the same files, and takes four times as long for what a tick needs (docs/decisions.md).
"""

from __future__ import annotations

import os
from typing import NamedTuple

_SECTOR_BYTES = 512
"""`/proc/diskstats` counts sectors of this size on every disk (Documentation/admin-guide/iostats of the kernel)."""
_LOOPBACK = "lo"


class Memory(NamedTuple):
    """Bytes of memory and swap, from `/proc/meminfo` (proc_meminfo(5))."""

    total: int
    available: int
    swap_used: int


def read_memory() -> Memory:
    """Memory and swap at this moment. Raises OSError, or LookupError or ValueError for a file of another form."""
    lines = (line.partition(":") for line in _proc_lines("meminfo"))
    kib = {name: int(size.split()[0]) for name, _, size in lines}
    return Memory(
        total=kib["MemTotal"] << 10,
        available=kib["MemAvailable"] << 10,
        swap_used=(kib["SwapTotal"] - kib["SwapFree"]) << 10,
    )


def read_disk_bytes() -> tuple[int, int] | None:
    """Bytes that all whole disks have read and written since boot; None without a disk. Raises as `read_memory`."""
    disks = {name.replace("!", "/") for name in os.listdir("/sys/block")}
    # Partitions have lines of their own, and their disk's line counts them too.
    counters = [fields for line in _proc_lines("diskstats") if (fields := line.split())[2] in disks]
    if not counters:
        return None
    read, written = sum(int(fields[5]) for fields in counters), sum(int(fields[9]) for fields in counters)
    return read * _SECTOR_BYTES, written * _SECTOR_BYTES


def read_network_bytes() -> tuple[int, int] | None:
    """Bytes received and sent by all interfaces but loopback, which carries gloo and local sockets; None without any.

    Raises as `read_memory`.
    """
    # Two lines of headings; then eight counters of receiving and eight of sending (proc_pid_net(5)).
    lines = (line.rpartition(":") for line in _proc_lines("net/dev")[2:])
    counters = [figures.split() for name, _, figures in lines if name.strip() != _LOOPBACK]
    return (sum(int(each[0]) for each in counters), sum(int(each[8]) for each in counters)) if counters else None


def _proc_lines(name: str) -> list[str]:
    with open(f"/proc/{name}", "rb", buffering=0) as file:
        return file.readall().decode().splitlines()

"""Memory, disks and network of the host, from files of `/proc`.

psutil reads the same files, and takes four times as long for what a tick needs (docs/decisions.md).
"""

from __future__ import annotations

import os
from typing import NamedTuple

_SECTOR_BYTES = 512
"""Of `/proc/diskstats`, whatever the disk's own are (Documentation/admin-guide/iostats of the kernel)."""
_LOOPBACK = "lo"


class Memory(NamedTuple):
    """Bytes of memory and swap, from `/proc/meminfo` (proc_meminfo(5))."""

    total: int
    available: int
    swap_used: int


def read_memory() -> Memory:
    """Memory and swap at this moment. Raises OSError, or LookupError or ValueError for a file of another form."""
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in _lines("meminfo"))}
    return Memory(
        total=kib["MemTotal"] << 10,
        available=kib["MemAvailable"] << 10,
        swap_used=(kib["SwapTotal"] - kib["SwapFree"]) << 10,
    )


def read_disk_bytes() -> tuple[int, int] | None:
    """Bytes that all whole disks have read and written since boot; None without a disk. Raises as `read_memory`."""
    disks = {name.replace("!", "/") for name in os.listdir("/sys/block")}
    # A partition has a line too, and what it counts is in its disk's.
    found = [fields for line in _lines("diskstats") if (fields := line.split())[2] in disks]
    if not found:
        return None
    read, written = sum(int(fields[5]) for fields in found), sum(int(fields[9]) for fields in found)
    return read * _SECTOR_BYTES, written * _SECTOR_BYTES


def read_network_bytes() -> tuple[int, int] | None:
    """Bytes that all interfaces have received and sent, without loopback's, which are gloo's and local sockets'.

    None without any. Raises as `read_memory`.
    """
    # Two lines of headings; then eight counters of receiving and eight of sending (proc_pid_net(5)).
    lines = (line.rpartition(":") for line in _lines("net/dev")[2:])
    found = [rest.split() for name, _, rest in lines if name.strip() != _LOOPBACK]
    return (sum(int(one[0]) for one in found), sum(int(one[8]) for one in found)) if found else None


def _lines(name: str) -> list[str]:
    with open(f"/proc/{name}", "rb", buffering=0) as file:
        return file.readall().decode().splitlines()

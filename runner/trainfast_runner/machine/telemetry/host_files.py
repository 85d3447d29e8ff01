"""Cores, memory, disks and network of the host, from files of `/proc`.

psutil reads the same files three to four times as slowly: a tick of eight GPUs took 2.5 ms, over its budget of 2 ms.
"""

from __future__ import annotations

import os
import re
from typing import NamedTuple

from trainfast_runner.machine.proc_files import read_proc
from trainfast_runner.machine.processes import TICKS_PER_S

_MEMORY = re.compile(r"^(MemTotal|MemAvailable|SwapTotal|SwapFree): +(\d+)", re.MULTILINE)
_SECTOR_BYTES = 512
"""`/proc/diskstats` counts sectors of this size on every disk (Documentation/admin-guide/iostats of the kernel)."""
_LOOPBACK = "lo"
BLOCK_DEVICES = "/sys/block"
"""A folder for each whole block device; the kernel's own (LVM, LUKS, md, loop) have no `device` in it."""


class CoreSeconds(NamedTuple):
    """Seconds of one core since boot; waiting for a disk counts as idle."""

    busy: float
    idle: float


def read_cores() -> list[CoreSeconds]:
    """Busy and idle seconds of each core, in order. Raises OSError, or LookupError or ValueError for a damaged file."""
    cores = []
    # The first line is the sum of all cores; the lines after the cores begin with other words.
    for line in _read("stat").splitlines()[1:]:
        if not line.startswith("cpu"):
            break
        # A guest's time, which follows, is in that of its user already (proc_stat(5)).
        user, nice, system, idle, disk_wait, irq, softirq, stolen = map(int, line.split()[1:9])
        busy = user + nice + system + irq + softirq + stolen
        cores.append(CoreSeconds(busy / TICKS_PER_S, (idle + disk_wait) / TICKS_PER_S))
    if not cores:
        raise ValueError("no cores are listed")
    return cores


def read_memory() -> dict[str, int]:
    """Memory and swap at this moment, by field of `HostReading` (proc_meminfo(5)). Raises as `read_cores`."""
    kib = {name: int(size) for name, size in _MEMORY.findall(_read("meminfo"))}
    return {
        "memory_used_bytes": (kib["MemTotal"] - kib["MemAvailable"]) << 10,
        "memory_total_bytes": kib["MemTotal"] << 10,
        "memory_available_bytes": kib["MemAvailable"] << 10,
        "swap_used_bytes": (kib["SwapTotal"] - kib["SwapFree"]) << 10,
    }


def read_disks() -> dict[str, int] | None:
    """Bytes that all whole disks have read and written since boot, by field of `HostReading`; None without a disk.

    A device that the kernel makes on top of a disk does not count: its disk counts the same bytes. Raises as
    `read_cores`.
    """
    disks = {
        name.replace("!", "/") for name in os.listdir(BLOCK_DEVICES) if os.path.exists(f"{BLOCK_DEVICES}/{name}/device")
    }
    # Partitions have lines of their own, and their disk's line counts them too.
    counters = [fields for line in _read("diskstats").splitlines() if (fields := line.split())[2] in disks]
    if not counters:
        return None
    return {
        "disk_read_bytes": _SECTOR_BYTES * sum(int(fields[5]) for fields in counters),
        "disk_write_bytes": _SECTOR_BYTES * sum(int(fields[9]) for fields in counters),
    }


def read_network() -> dict[str, int] | None:
    """Bytes received and sent by all interfaces but loopback, by field of `HostReading`; None without any.

    Loopback carries gloo and local sockets. Raises as `read_cores`.
    """
    # Two lines of headings; then eight counters of receiving and eight of sending (proc_pid_net(5)).
    lines = (line.rpartition(":") for line in _read("net/dev").splitlines()[2:])
    interfaces = [figures.split() for name, _, figures in lines if name.strip() != _LOOPBACK]
    if not interfaces:
        return None
    return {
        "network_received_bytes": sum(int(counters[0]) for counters in interfaces),
        "network_sent_bytes": sum(int(counters[8]) for counters in interfaces),
    }


def _read(name: str) -> str:
    return read_proc(name).decode()

"""The control groups that this process is in, of version 2 and of version 1's memory controller."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

PROC_SELF = Path("/proc/self")
_USED_FILES = {
    "memory.max": ("memory.current", "inactive_file"),
    "memory.limit_in_bytes": ("memory.usage_in_bytes", "total_inactive_file"),
}
"""By the file of a group's limit: the file of its used memory, and the field of `memory.stat` that counts the file
pages in it that are not in use (Linux, cgroup-v2.rst and cgroup-v1/memory.rst)."""


def memory_files(v2: str, v1: str, proc: Path = PROC_SELF) -> Iterator[Path]:
    """Yield the paths of the file `v2` (`v1` under version 1) in this process's groups, its own first.

    Not every one of them exists. Inside a container the mount's root may stand for a group of the host's.
    """
    for line in _file_lines(proc / "cgroup"):
        _, _, controllers_and_group = line.partition(":")
        controllers, _, group = controllers_and_group.partition(":")
        if controllers == "" or "memory" in controllers.split(","):
            for mount, root in _mounts(proc, is_v2=controllers == ""):
                group_path = Path(os.path.normpath(os.path.relpath(group, root)))
                yield from (mount / part / (v1 if controllers else v2) for part in (group_path, *group_path.parents))


def tightest_group_limit(proc: Path = PROC_SELF) -> tuple[int | None, str]:
    """Bytes of the tightest memory limit of this process's groups, and its file; None without a limit."""
    limits: list[tuple[int, str]] = []
    for path in _limit_files(proc):
        with suppress(OSError):
            value = path.read_text().strip()
            # Version 1 writes "no limit" as the largest multiple of the page size that fits 63 bits.
            if value.isdecimal() and int(value) < 1 << 60:
                limits.append((int(value), str(path)))
    return min(limits, default=(None, ""))


def read_host_free_bytes() -> int:
    """Bytes of host memory that this process's control groups let it use now without swapping."""
    import psutil

    return free_within_limits(int(psutil.virtual_memory().available))


def free_within_limits(free_bytes: int, proc: Path = PROC_SELF) -> int:
    """Return the host's free bytes, or less if a group of this process has less left of its limit.

    File pages that the kernel can drop count as free.
    """
    for path in _limit_files(proc):
        # Without a limit, version 2 writes the word max.
        with suppress(OSError, ValueError):
            used_file, field = _USED_FILES[path.name]
            used_bytes = int(path.with_name(used_file).read_text()) - _stat_bytes(path.with_name("memory.stat"), field)
            free_bytes = min(free_bytes, int(path.read_text()) - used_bytes)
    return max(0, free_bytes)


def oom_kills() -> int | None:
    """The kernel's out-of-memory kills so far: in this group (`memory.events`), else on the whole machine.

    None when Linux counts none. Take differences.
    """
    for path in (*memory_files("memory.events", "memory.oom_control"), Path("/proc/vmstat")):
        if match := re.search(r"^oom_kill (\d+)$", "\n".join(_file_lines(path)), re.MULTILINE):
            return int(match[1])
    return None


def _stat_bytes(path: Path, field: str) -> int:
    """Return a field of a group's `memory.stat`; 0 if the file lacks it."""
    lines = (line.split() for line in _file_lines(path))
    return next((int(words[1]) for words in lines if words[:1] == [field]), 0)


def _limit_files(proc: Path) -> Iterator[Path]:
    return memory_files("memory.max", "memory.limit_in_bytes", proc)


@functools.cache
def _mounts(proc: Path, *, is_v2: bool) -> tuple[tuple[Path, str], ...]:
    """Mount points of version 2 or of the memory controller, each with the group that is mounted there (proc(5)).

    They stay as they are while a process runs; the group that it is in may change.
    """
    mounts = []
    for line in _file_lines(proc / "mountinfo"):
        mount, _, kind = line.partition(" - ")
        fields, kinds = mount.split(), kind.split()
        if kinds[:1] == ["cgroup2"] if is_v2 else kinds[:1] == ["cgroup"] and "memory" in kinds[-1].split(","):
            mounts.append((Path(fields[4]), fields[3]))
    return tuple(mounts)


def _file_lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []

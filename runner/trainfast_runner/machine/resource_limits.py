"""The limits of memory and processes that a training inherits, and which of them explains an error."""

from __future__ import annotations

import functools
import os
import re
import resource
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from trainfast_runner.records.json_lines import text_of
from trainfast_runner.units import mebibytes

CGROUP, PROCESSES = "cgroup", "RLIMIT_NPROC"
MEMORY_LIMITS = {"RLIMIT_AS": "ulimit -v", "RLIMIT_DATA": "ulimit -d", CGROUP: "memory.max"}
"""The limits in bytes, by `getrlimit`'s name, and where each is set."""
KERNEL_KILLER = "the kernel's out-of-memory killer"
"""The words of a verdict for a kill by the kernel, the only end that a cgroup's limit of memory brings."""
NO_MEMORY = re.compile(
    r"\bMemoryError\b|bad_alloc|\[Errno 12\]|allocation still failed|failed to map segment"
    r"|(?:can't|cannot|unable to) allocate",
    re.I,
)
NO_PROCESS = re.compile(
    r"start new thread|resource temporarily unavailable|pthread_create|ThreadPoolBuild|EAGAIN", re.I
)
"""Errors of a process that gets no memory of the host, or that gets no thread or child."""


def inherited_limits() -> dict[str, int]:
    """Return this process's limits that bind: those of memory below the host's own, and that of processes."""
    limits = {
        name: resource.getrlimit(getattr(resource, name))[0] for name in (*MEMORY_LIMITS, PROCESSES) if name != CGROUP
    }
    limits[CGROUP] = tightest_group_limit()[0] or resource.RLIM_INFINITY
    host_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        name: limit
        for name, limit in limits.items()
        if limit != resource.RLIM_INFINITY and (name == PROCESSES or limit < host_bytes)
    }


def limit_words(limits: Mapping[str, int], error: str, output: str = "") -> str:
    """Return the limits that explain an error, as `; RLIMIT_AS (ulimit -v) is 586 MiB`; empty without any.

    `output` is more text of the process, in which only a missing process or thread counts.
    """
    if PROCESSES in limits and NO_PROCESS.search(f"{error}\n{output}"):
        return f"; {PROCESSES} (ulimit -u) allows {limits[PROCESSES]:,} processes and threads of this user"
    is_kill = KERNEL_KILLER in error
    if not is_kill and not NO_MEMORY.search(error):
        return ""
    words = [
        f"{name} ({set_by}) is {mebibytes(limits[name])}"
        for name, set_by in MEMORY_LIMITS.items()
        if name in limits and (name == CGROUP) == is_kill
    ]
    return f"; {', '.join(words)}" if words else ""


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
    for line in text_of(proc / "cgroup").splitlines():
        _, _, controllers_and_group = line.partition(":")
        controllers, _, group = controllers_and_group.partition(":")
        if controllers == "" or "memory" in controllers.split(","):
            for mount, root in _mounts(proc, is_v2=controllers == ""):
                group_path = Path(os.path.normpath(os.path.relpath(group, root)))
                yield from (mount / part / (v1 if controllers else v2) for part in (group_path, *group_path.parents))


def tightest_group_limit(proc: Path = PROC_SELF) -> tuple[int | None, str]:
    """Bytes of the tightest memory limit of this process's groups, and its file; None without a limit."""
    return min(((limit, str(path)) for limit, path in _group_limits(proc)), default=(None, ""))


def read_host_free_bytes() -> int:
    """Bytes of host memory that this process's control groups let it use now without swapping."""
    import psutil

    return free_within_limits(int(psutil.virtual_memory().available))


def free_within_limits(free_bytes: int, proc: Path = PROC_SELF) -> int:
    """Return the host's free bytes, or less if a group of this process has less left of its limit.

    File pages that the kernel can drop count as free.
    """
    for limit_bytes, path in _group_limits(proc):
        used_file, field = _USED_FILES[path.name]
        fields = (line.split() for line in text_of(path.with_name("memory.stat")).splitlines())
        with suppress(OSError, ValueError):
            dropped_bytes = next((int(words[1]) for words in fields if words[:1] == [field]), 0)
            used_bytes = int(path.with_name(used_file).read_text()) - dropped_bytes
            free_bytes = min(free_bytes, limit_bytes - used_bytes)
    return max(0, free_bytes)


def oom_kills() -> int | None:
    """The kernel's out-of-memory kills so far: in this group (`memory.events`), else on the whole machine.

    None when Linux counts none. Take differences.
    """
    for path in (*memory_files("memory.events", "memory.oom_control"), Path("/proc/vmstat")):
        if match := re.search(r"^oom_kill (\d+)$", text_of(path), re.MULTILINE):
            return int(match[1])
    return None


def _group_limits(proc: Path) -> Iterator[tuple[int, Path]]:
    """Yield the memory limits of this process's groups in bytes, each with its file."""
    for path in memory_files("memory.max", "memory.limit_in_bytes", proc):
        text = text_of(path).strip()
        # No limit is the word max in version 2, in version 1 the largest multiple of the page size in 63 bits.
        if text.isdecimal() and int(text) < 1 << 60:
            yield int(text), path


@functools.cache
def _mounts(proc: Path, *, is_v2: bool) -> tuple[tuple[Path, str], ...]:
    """Mount points of version 2 or of the memory controller, each with the group that is mounted there (proc(5)).

    They stay as they are while a process runs; the group that it is in may change.
    """
    mounts = []
    for line in text_of(proc / "mountinfo").splitlines():
        mount, _, kind = line.partition(" - ")
        fields, kinds = mount.split(), kind.split()
        if kinds[:1] == ["cgroup2"] if is_v2 else kinds[:1] == ["cgroup"] and "memory" in kinds[-1].split(","):
            mounts.append((Path(fields[4]), fields[3]))
    return tuple(mounts)

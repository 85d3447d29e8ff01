"""The limits of memory and processes that a training inherits, and which of them explains an error."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Mapping

from trainfast_runner.machine.cgroup import tightest_group_limit
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

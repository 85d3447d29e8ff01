"""Facts of a process for its records, and the limit of its memory; the worker and the hooks in a script share them.

The hooks load this file by its path: standard library only, for Python 3.8 and later.
"""

from __future__ import annotations

import resource
from typing import Any

TRACEBACK_CHARACTERS, MESSAGE_CHARACTERS = 4000, 2000
"""The most that a record keeps of a traceback and of a message."""
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
"""mallopt's parameters, from glibc's malloc.h."""
STRICT_BYTES = 128 << 10
"""glibc's initial value of both thresholds; setting it keeps them from growing."""
ORDINARY_MMAP_BYTES = 32 << 20
"""The most that glibc's own threshold grows to on 64 bits (DEFAULT_MMAP_THRESHOLD_MAX, malloc.c)."""
ORDINARY_TRIM_BYTES = 256 << 20
"""Free bytes at the top of the heap beyond which glibc returns them; chosen by measured speed (docs/decisions.md)."""


def rank_suffix(rank: int) -> str:
    """Part of a file's name: empty for rank 0, else `.rank1` and so on."""
    return "" if rank == 0 else f".rank{rank}"


def start_ticks() -> int:
    """Start time of this process in clock ticks since boot (field 22 of `/proc/self/stat`), which tells pids apart."""
    with open("/proc/self/stat") as file:
        return int(file.read().rpartition(")")[2].split()[19])


def finite(value: Any) -> Any:
    """Return `value` with null in place of each number that JSON cannot hold: NaN and infinities."""
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value


def exception_chain(error: BaseException) -> list[dict[str, str]]:
    """The error and its causes, outermost first, as `{type, message}`; types outside builtins carry their module."""
    chain: list[dict[str, str]] = []
    seen_ids = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen_ids:
        seen_ids.add(id(link))
        kind = type(link)
        name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        try:
            message = str(link)
        except Exception:
            message = ""
        chain.append({"type": name, "message": message[:MESSAGE_CHARACTERS]})
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return chain


def status_bytes() -> dict[str, int]:
    """The figures of `/proc/self/status` that have a unit, by their names, in bytes (proc_pid_status(5))."""
    with open("/proc/self/status", "rb") as file:
        return parsed_status(file.read())


def parsed_status(status: bytes) -> dict[str, int]:
    """The figures of the content of `/proc/self/status` that have a unit, in bytes."""
    rows = (line.split() for line in status.splitlines() if line.endswith(b" kB"))
    return {name[:-1].decode(): int(size) * 1024 for name, size, _ in rows}


def limit_data(cap_bytes: int) -> None:
    """Set the soft limit RLIMIT_DATA as far as the hard limit allows; RLIM_INFINITY lifts the limit."""
    _, hard_bytes = resource.getrlimit(resource.RLIMIT_DATA)
    bounds = [one for one in (cap_bytes, hard_bytes) if one != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min(bounds, default=resource.RLIM_INFINITY), hard_bytes))


class AddressSpacePeak:
    """The peak of VmData: the private writable address space, touched or not, that RLIMIT_DATA counts.

    The kernel keeps a high-water mark of all address space (VmPeak) but none of VmData, so the peak is the growth of
    VmPeak less the growth of mapped files. Make the object when the limit is set.
    """

    def __init__(self) -> None:
        self._first = status_bytes()

    def read(self) -> int | None:
        """Bytes above VmData at the start; None until VmPeak rises above its value at that moment."""
        status, first = status_bytes(), self._first
        if status["VmPeak"] <= first["VmPeak"]:
            return None
        files_growth = (status["VmSize"] - status["VmData"]) - (first["VmSize"] - first["VmData"])
        return max(0, status["VmPeak"] - first["VmSize"] - max(0, files_growth))

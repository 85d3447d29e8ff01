"""Facts of a process for its records, the limit of its memory, and its end, for the worker and the hooks in a script.

The hooks load this file by its path: standard library only, for Python 3.8 and later.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import resource
import signal
import sys
import traceback
from contextlib import suppress
from typing import Any, NoReturn

TRACEBACK_CHARACTERS, MESSAGE_CHARACTERS = 4000, 2000
"""The most that a record keeps of a traceback and of a message."""
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
"""mallopt's parameters, from glibc's malloc.h."""
STRICT_BYTES = 64 << 10
"""Half of glibc's initial value of both thresholds; setting it keeps them from growing.

Smaller tensors leave holes in the heap: under ddp+tp+pp tiny-llama's slices have 72 to 98 KiB, and at 128 KiB a rank
of 24 MiB of tensors grew from 30 to 57 MiB in twelve steps; at 32 KiB it has 28 MiB. Each mapping costs page faults:
a model of 48 layers of 64 took 62 samples/s at 128 KiB and 38 at 32, under a limit, which keeps them strict.
"""
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


_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False, default=str).encode
"""Returns the JSON of a value; raises ValueError for a number that is not finite."""


class LineFile:
    """An append-only file of JSON lines. Each write is one `os.write` to an O_APPEND descriptor, so lines never mix."""

    def __init__(self, path: str, flags: int = 0) -> None:
        """Open the file, with these flags of `os.open` too. Raises OSError."""
        self.name = os.path.basename(path)
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | flags, 0o600)
        self._torn = False
        """True if the last write was cut short: the next one begins on a line of its own."""

    def write(self, line: dict[str, Any]) -> None:
        """Append a line; a number that JSON cannot hold (NaN, infinity) becomes null. Raises as `write_text`."""
        try:
            text = _encode(line)
        except ValueError:
            text = _encode(_finite(line))
        self.write_text(text + "\n")

    def write_text(self, lines: str) -> None:
        """Append whole lines in one write. Raises OSError if the disk takes none of them or only a part."""
        text = (("\n" if self._torn else "") + lines).encode()
        self._torn = os.write(self._fd, text) < len(text)
        if self._torn:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


def _finite(value: Any) -> Any:
    """Return `value` with null in place of each number that JSON cannot hold: NaN and infinities."""
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
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


def exception_fields(error: BaseException) -> dict[str, Any]:
    """Fields of an `exception` record: type and message, the chain of causes, and the end of the traceback."""
    chain = exception_chain(error)
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return {**chain[0], "chain": chain, "traceback": text[-TRACEBACK_CHARACTERS:]}


STATUS_NAMES = ("VmPeak", "VmSize", "VmData", "VmHWM", "VmRSS", "RssFile")
"""Names of the figures that are read of `/proc/self/status`, in kB there (proc_pid_status(5))."""


def status_bytes() -> dict[str, int]:
    """The figures of `/proc/self/status`, in bytes."""
    with open("/proc/self/status", "rb") as file:
        return parsed_status(file.read())


def parsed_status(status: bytes) -> dict[str, int]:
    """The figures in the content of `/proc/self/status`, in bytes."""
    return {name: int(status.partition(b"\n%s:" % name.encode())[2].split(None, 1)[0]) * 1024 for name in STATUS_NAMES}


def resident_peak(status: dict[str, int], first: dict[str, int]) -> int:
    """Peak of resident bytes above those in `first`, two readings of `/proc/self/status`.

    Pages of files do not count: a first step reads some 10 MiB of libraries, and a page once read stays.
    """
    read_bytes = max(0, status["RssFile"] - first["RssFile"])
    return max(0, status["VmHWM"] - first["VmRSS"] - read_bytes)


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


PR_SET_PDEATHSIG = 1
"""prctl's option, from sys/prctl.h."""


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Have the kernel signal this process as soon as the thread that started it ends; only Linux can."""
    with suppress(AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def exit_now(code: int) -> NoReturn:
    """End this process at once, without teardown.

    After an error, leaving a process group or a CUDA context can block for ever; after a good end, gloo's threads
    sometimes abort a process that leaves its group.
    """
    import multiprocessing  # not for the hooks, which load this file too

    for child in multiprocessing.active_children():
        child.terminate()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # a full disk takes no output
            stream.flush()
    os._exit(code)

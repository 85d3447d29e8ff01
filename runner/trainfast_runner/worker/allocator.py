"""The C library's malloc thresholds of a CPU run: strict where memory is measured, ordinary where time is.

Under strict thresholds every tensor of 128 KiB and more is a mapping of its own, which the kernel gets back when it is
freed: resident memory is what the tensors need. Page faults make such a step twice as slow, so no timed step runs
under them unless the run has a memory limit. Standard library only: call `strict` before torch is imported.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from pathlib import Path

# mallopt's parameters, from glibc's malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
STRICT_BYTES = 128 << 10
"""glibc's initial value of both thresholds, which setting it keeps from growing."""
ORDINARY_MMAP_BYTES = 32 << 20
"""The most that glibc's own threshold grows to on 64 bits (DEFAULT_MMAP_THRESHOLD_MAX, malloc.c)."""
ORDINARY_TRIM_BYTES = 256 << 20
STRICT, ORDINARY, KEPT = "strict", "ordinary", "kept"


class _Symbol(ctypes.Structure):
    """Dl_info of dlfcn.h."""

    _fields_ = [
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    ]


class Allocator:
    """The malloc of this process. `thresholds` is strict, ordinary, or kept: the user's own, never touched.

    `kept_because` names the user's setting or allocator; None where the thresholds are ours to set.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._library = ctypes.CDLL(None)
        self.name = _name(self._library)
        self.kept_because = _kept_because(self.name, environment)
        self.thresholds = ORDINARY if self.kept_because is None else KEPT

    def strict(self) -> None:
        """Give freed blocks of 128 KiB and more back to the kernel at once; one arena, so that heaps do not scatter."""
        self._set(STRICT, ((M_ARENA_MAX, 1), (M_MMAP_THRESHOLD, STRICT_BYTES), (M_TRIM_THRESHOLD, STRICT_BYTES)))

    def ordinary(self) -> None:
        """Keep freed blocks for the next step, as glibc does by itself once a process has freed large ones."""
        self._set(ORDINARY, ((M_MMAP_THRESHOLD, ORDINARY_MMAP_BYTES), (M_TRIM_THRESHOLD, ORDINARY_TRIM_BYTES)))

    def _set(self, thresholds: str, parameters: tuple[tuple[int, int], ...]) -> None:
        if self.kept_because is not None:
            return
        for parameter, value in parameters:
            if not self._library.mallopt(parameter, value):
                raise OSError(f"mallopt({parameter}, {value}) failed")
        self.thresholds = thresholds


def begin_loader(_number: int) -> None:
    """Give a data-loader process, forked under strict thresholds, ordinary ones: nobody measures its memory."""
    Allocator().ordinary()


def _name(library: ctypes.CDLL) -> str:
    """`glibc 2.36`, or the file that a preloaded malloc comes from, such as `libjemalloc.so.2`."""
    found = _Symbol()
    address = ctypes.cast(library.malloc, ctypes.c_void_p)
    if not library.dladdr(address, ctypes.byref(found)) or not found.file:
        return "unknown"
    file = Path(os.fsdecode(found.file)).name
    if not file.startswith(("libc.so", "libc-")) or not hasattr(library, "gnu_get_libc_version"):
        return file
    library.gnu_get_libc_version.restype = ctypes.c_char_p
    return f"glibc {library.gnu_get_libc_version().decode()}"


def _kept_because(name: str, environment: Mapping[str, str]) -> str | None:
    if not name.startswith("glibc"):
        return f"malloc is {name}, which has no thresholds of glibc's"
    own = malloc_settings(environment)
    return f"{', '.join(own)} {'is' if len(own) == 1 else 'are'} set" if own else None


def malloc_settings(environment: Mapping[str, str]) -> list[str]:
    """The user's own settings of glibc's malloc, by name."""
    own = sorted(variable for variable in environment if variable.startswith("MALLOC_"))
    if "glibc.malloc." in environment.get("GLIBC_TUNABLES", ""):
        own.append("GLIBC_TUNABLES")
    return own

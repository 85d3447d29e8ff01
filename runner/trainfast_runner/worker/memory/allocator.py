"""Malloc thresholds of a CPU run: strict in steps whose memory is measured, ordinary in steps whose time is.

Under strict thresholds every tensor of 64 KiB and more is a mapping of its own that goes back to the kernel when the
tensor is freed, so resident memory is the memory that the tensors need. Page faults double the time of such a step: no
timed step runs under strict thresholds unless the run has a memory limit. Call `set_strict` before torch is imported:
this file imports torch only to ask a device.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..shared.memory_limit import KEPT, ORDINARY, STRICT, malloc_settings
from ..shared.process import (
    M_ARENA_MAX,
    M_MMAP_THRESHOLD,
    M_TRIM_THRESHOLD,
    ORDINARY_MMAP_BYTES,
    ORDINARY_TRIM_BYTES,
    STRICT_BYTES,
)

if TYPE_CHECKING:
    import torch

LARGEST_WITHHELD_BYTES = 1 << 30
"""The largest free heap block that is looked for; sizes are halved from here."""
SIZE_FIELD_BYTES, IS_MMAPPED = ctypes.sizeof(ctypes.c_size_t), 0x2
"""A block's size and flags stand in the word before it (struct malloc_chunk, malloc.c)."""


class Allocator:
    """The malloc of this process. `thresholds` is strict, ordinary, or kept (the user's own, never changed).

    `kept_reason` names the user's setting or allocator; None if the thresholds are ours to set.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._library = ctypes.CDLL(None)
        self.name = _name(environment)
        self.kept_reason = _kept_reason(self.name, environment)
        self.thresholds = ORDINARY if self.kept_reason is None else KEPT
        self._library.malloc.restype = ctypes.c_void_p
        self._library.malloc.argtypes = [ctypes.c_size_t]
        self._library.free.argtypes = [ctypes.c_void_p]
        self._withheld: list[int] = []

    def set_strict(self) -> None:
        """Return freed blocks of 64 KiB and more to the kernel at once; use one arena, so that heaps stay together."""
        self._set(STRICT, ((M_ARENA_MAX, 1), (M_MMAP_THRESHOLD, STRICT_BYTES), (M_TRIM_THRESHOLD, STRICT_BYTES)))

    def set_ordinary(self) -> None:
        """Keep freed blocks for the next step, as glibc does by default after a process has freed large ones."""
        while self._withheld:
            self._library.free(self._withheld.pop())
        self._set(ORDINARY, ((M_MMAP_THRESHOLD, ORDINARY_MMAP_BYTES), (M_TRIM_THRESHOLD, ORDINARY_TRIM_BYTES)))

    def set_strict_again(self) -> None:
        """Switch from ordinary to strict thresholds.

        malloc reuses a free heap block before it maps a new one, and returns no part of it to the kernel. So every free
        block of 64 KiB or more is allocated here, untouched, and freed by `set_ordinary`.
        """
        if self.kept_reason is not None:
            return
        self.set_strict()
        self._library.malloc_trim(ctypes.c_size_t(0))
        size = LARGEST_WITHHELD_BYTES
        while size >= STRICT_BYTES:
            block = self._library.malloc(size)
            if block and not ctypes.c_size_t.from_address(block - SIZE_FIELD_BYTES).value & IS_MMAPPED:
                self._withheld.append(block)
            else:
                self._library.free(block)
                size //= 2

    def _set(self, thresholds: str, parameters: tuple[tuple[int, int], ...]) -> None:
        if self.kept_reason is not None:
            return
        for parameter, value in parameters:
            if not self._library.mallopt(parameter, value):
                raise OSError(f"mallopt({parameter}, {value}) failed")
        self.thresholds = thresholds


def use_ordinary_thresholds(_number: int) -> None:
    """Set ordinary thresholds in a data-loader process, whose memory is not measured."""
    Allocator().set_ordinary()


def _name(environment: Mapping[str, str]) -> str:
    """Return `glibc 2.36`, or the file of a preloaded malloc, such as `libjemalloc.so.2`."""
    preloaded_files = [Path(file).name for file in re.split("[: ]", environment.get("LD_PRELOAD", ""))]
    return next((file for file in preloaded_files if "malloc" in file), os.confstr("CS_GNU_LIBC_VERSION") or "unknown")


def _kept_reason(name: str, environment: Mapping[str, str]) -> str | None:
    if not name.startswith("glibc"):
        return f"malloc is {name}, which has no thresholds of glibc's"
    malloc_names = malloc_settings(environment)
    return f"{', '.join(malloc_names)} {'is' if len(malloc_names) == 1 else 'are'} set" if malloc_names else None


LOW_BYTES = 1 << 30
"""Memory below this is low: cuBLAS's handles and most workspaces of cuDNN take less."""
LOW_SHARE = 0.05
"""Less than this share of a device's memory is low too."""


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes that a device can still give; `is_low` if a library may just have asked for more."""

    free_bytes: int
    is_low: bool


def fullest_device_memory(devices: list[torch.device], limit_bytes: int | None) -> DeviceMemory | None:
    """Available memory of the fullest device; None for a CPU, and for a device that no longer answers."""
    if devices[0].type != "cuda":
        return None
    try:
        return min((_available(device, limit_bytes) for device in devices), key=lambda memory: memory.free_bytes)
    except RuntimeError:
        return None


def _available(device: torch.device, limit_bytes: int | None) -> DeviceMemory:
    import torch

    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    if limit_bytes is not None:
        free_bytes = max(0, min(free_bytes, limit_bytes - torch.cuda.memory_allocated(device)))
    return DeviceMemory(free_bytes, free_bytes < max(LOW_BYTES, LOW_SHARE * total_bytes))

"""Memory that the training takes, and its limit; all figures in bytes."""

from __future__ import annotations

import gc
import os

import torch

from ..shared.process import AddressSpacePeak, limit_data, parsed_status, resident_peak
from ..shared.words import MEMORY_PHASES
from .allocator import Allocator

RESERVE_BYTES = 16 << 20
"""Chosen, not measured: kept free for the last records after out of memory."""
STATUS_BYTES = 4096
"""More than `/proc/self/status` has."""
WARM_ROWS, WARM_DEPTH, WARM_COLUMNS = 1024, 384, 6400
"""A product, its columns those of a thread, after which none takes more of MKL's buffers, which are never freed.

Measured with torch 2.13 on an AMD EPYC and 1, 2, 4 and 16 threads: a thread packs operands into 0.58 MiB and 768 bytes
a column, 5.27 MiB at most, and keeps a smaller product's buffer beside. tiny-llama's head takes 3.6 MiB a thread.
"""
MOST_WARM_THREADS = 16
"""Chosen, not measured: the product takes 34 MiB a thread."""


def make_memory_meter(devices: list[torch.device], limit_bytes: int | None, allocator: Allocator) -> MemoryMeter:
    """Make the meter of this process's devices."""
    if devices[0].type == "cuda":
        return CudaMemoryMeter(devices, limit_bytes)
    return HostMemoryMeter(limit_bytes, allocator)


NOT_MEASURED: dict[str, object] = {
    "peak_allocated_bytes": None,
    "peak_reserved_bytes": None,
    "alloc_retries": 0,
    "phase_peaks": None,
}
"""Memory fields of a CPU step under ordinary thresholds, whose resident memory includes freed blocks."""


def step_fields(peaks: dict[str, int], reserved_bytes: int, retries: int) -> dict[str, object]:
    """Memory fields of a step record."""
    return {
        "peak_allocated_bytes": max(peaks.values()),
        "peak_reserved_bytes": reserved_bytes,
        "alloc_retries": retries,
        "phase_peaks": dict(peaks),
    }


class HostMemoryMeter:
    """Measures the high-water mark of resident memory above the resident memory before the model was built.

    The limit is RLIMIT_DATA at VmData plus `limit_bytes`, so that the allocator itself refuses.

    The first `strict_steps` steps are measured under strict malloc thresholds; None measures every step. Later steps
    have ordinary thresholds and null fields, as all steps have under an allocator that is not ours to set.
    """

    def __init__(self, limit_bytes: int | None, allocator: Allocator) -> None:
        self.limit_bytes = limit_bytes
        self._allocator = allocator
        self._strict_steps_left: int | None = 0
        self._first: dict[str, int] = {}
        """The memory of this process before the model was built, and what compilers have kept; empty before `start`."""
        self._before_compiling: dict[str, int] = {}
        self._peaks = dict.fromkeys(MEMORY_PHASES, 0)
        self._peak_before_compiling = 0
        """Peak of the phase before it compiled."""
        self._status_fd = os.open("/proc/self/status", os.O_RDONLY | os.O_CLOEXEC)
        self._clear_fd = os.open("/proc/self/clear_refs", os.O_WRONLY | os.O_CLOEXEC)
        self._address_space: AddressSpacePeak | None = None
        """The bytes that the limit counts, since it was set; None before."""
        # Counted before the limit, never touched.
        self._reserve: bytearray | None = bytearray(RESERVE_BYTES)

    def start(self, strict_steps: int | None) -> None:
        """Take the baseline, set the limit, and begin `strict_steps` strict steps (None: all).

        The first call warms torch's threads and the library of matrix products, so that they are in the baseline.
        """
        if not self._first:
            warm = torch.ones(64, 64, requires_grad=True)
            (warm @ warm).sum().backward()  # type: ignore[no-untyped-call]
            columns = WARM_COLUMNS * min(torch.get_num_threads(), MOST_WARM_THREADS)
            torch.ones(WARM_ROWS, WARM_DEPTH) @ torch.ones(WARM_DEPTH, columns)
            del warm
        self._strict_steps_left = 0 if self._allocator.kept_reason else strict_steps
        self._peak_before_compiling = 0
        self._peaks = dict.fromkeys(MEMORY_PHASES, 0)
        self._first = self._read_status()
        if self.limit_bytes is not None:
            limit_data(self._first["VmData"] + self.limit_bytes)
        self._address_space = AddressSpacePeak()
        os.pwrite(self._clear_fd, b"5", 0)
        if self._strict_steps_left == 0:
            self._allocator.set_ordinary()

    def return_freed(self) -> None:
        """Return free blocks to the kernel, and from now on each block when it is freed."""
        self._allocator.set_strict_again()

    def end_phase(self, phase: str) -> None:
        """Read VmHWM and reset it, unless this step's memory is not measured."""
        if self._strict_steps_left != 0:
            self._peaks[phase] = self._high_water()
            self._peak_before_compiling = 0
            os.pwrite(self._clear_fd, b"5", 0)

    def begin_compiling(self) -> None:
        """Take the peak so far: until `end_compiling` memory is the compiler's."""
        # Collected while it compiles, garbage of the training would count as memory that the compiler gave back.
        gc.collect()
        self._peak_before_compiling = self._high_water()
        self._before_compiling = self._read_status()

    def end_compiling(self) -> None:
        """Add what the compiler keeps, with its programs, to the baseline: some 100 MiB, 65 with a cached program."""
        after, before = self._read_status(), self._before_compiling
        self._first["VmRSS"] += (after["VmRSS"] - after["RssFile"]) - (before["VmRSS"] - before["RssFile"])
        # The watch of each earlier setting of this process ends the same compilation too.
        self._before_compiling = after
        os.pwrite(self._clear_fd, b"5", 0)

    def peak_bytes(self) -> int | None:
        """Read VmHWM without resetting it; None when memory is not measured."""
        return None if self._strict_steps_left == 0 else self._high_water()

    def limit_peak_bytes(self) -> int | None:
        """Peak of the bytes that the limit counts, since it was set; None when unknown."""
        return None if self._address_space is None else self._address_space.read()

    def available_bytes(self) -> int | None:
        """Return the limit."""
        return self.limit_bytes

    def _high_water(self) -> int:
        return max(resident_peak(self._read_status(), self._first), self._peak_before_compiling)

    def end_step_fields(self) -> dict[str, object]:
        """End the step's measurement and return its fields; after the last strict step set the ordinary thresholds.

        Reserved equals allocated, because freed blocks go back to the kernel.
        """
        if self._strict_steps_left == 0:
            return NOT_MEASURED
        fields = step_fields(self._peaks, max(self._peaks.values()), 0)
        if self._strict_steps_left is not None:
            self._strict_steps_left -= 1
            if self._strict_steps_left == 0:
                self._allocator.set_ordinary()
        return fields

    def free_reserve(self) -> None:
        """Free the reserve that was counted under the limit."""
        self._reserve = None

    def _read_status(self) -> dict[str, int]:
        return parsed_status(os.pread(self._status_fd, STATUS_BYTES, 0))


class CudaMemoryMeter:
    """Reads the caching allocator's peaks on the fullest device. The limit caps each device, without its context."""

    def __init__(self, devices: list[torch.device], limit_bytes: int | None) -> None:
        self._devices = devices
        self.limit_bytes = limit_bytes
        self._peaks = dict.fromkeys(MEMORY_PHASES, 0)
        self._reserved_bytes = 0
        self._retries = 0

    def start(self, strict_steps: int | None) -> None:
        """Cap the allocator and reset its peaks. A GPU has no strict steps."""
        torch.cuda.set_device(self._devices[0])
        for device in self._devices:
            if self.limit_bytes is not None:
                total_bytes = torch.cuda.get_device_properties(device).total_memory
                torch.cuda.set_per_process_memory_fraction(min(1.0, self.limit_bytes / total_bytes), device)
            torch.cuda.reset_peak_memory_stats(device)

    def return_freed(self) -> None:
        """Empty the allocator's cache."""
        for device in self._devices:
            torch.cuda.synchronize(device)
        torch.cuda.empty_cache()

    def end_phase(self, phase: str) -> None:
        """Read and reset the allocator's peaks, which are host counters: nothing waits for the device."""
        stats = [torch.cuda.memory_stats_as_nested_dict(device) for device in self._devices]
        self._peaks[phase] = max(counters["allocated_bytes"]["all"]["peak"] for counters in stats)
        self._reserved_bytes = max(
            self._reserved_bytes, *(counters["reserved_bytes"]["all"]["peak"] for counters in stats)
        )
        self._retries = sum(counters["num_alloc_retries"] for counters in stats)
        for device in self._devices:
            torch.cuda.reset_peak_memory_stats(device)

    def begin_compiling(self) -> None:
        """Nothing to leave out: the compiler's memory is the host's."""

    end_compiling = begin_compiling

    def end_step_fields(self) -> dict[str, object]:
        """End the step's measurement and return its fields; `alloc_retries` counts from the start of the process."""
        fields = step_fields(self._peaks, self._reserved_bytes, self._retries)
        self._reserved_bytes = 0
        return fields

    def peak_bytes(self) -> int | None:
        """Return the peak of the fullest device; None after an error of the device itself."""
        try:
            return max(int(torch.cuda.max_memory_allocated(device)) for device in self._devices)
        except RuntimeError:
            return None

    def limit_peak_bytes(self) -> int | None:
        """Return None: the peaks of the steps are of the bytes that the limit counts."""
        return None

    def available_bytes(self) -> int | None:
        """Most that the allocator may hold now, up to its limit; less when another process takes memory."""
        free_bytes, _ = torch.cuda.mem_get_info(self._devices[0])
        available_bytes = free_bytes + torch.cuda.memory_reserved(self._devices[0])
        return available_bytes if self.limit_bytes is None else min(available_bytes, self.limit_bytes)

    def free_reserve(self) -> None:
        """Nothing to free: records are written from host memory."""


MemoryMeter = HostMemoryMeter | CudaMemoryMeter
"""Measures the peak of each phase of a step.

`start` takes the baseline and sets the limit, when everything but the training is in memory, and before each setting of
a process that trains several. `end_step_fields` returns the memory fields of the phases that have ended since its last
call.
`free_reserve` frees memory for the last records, also after an error.
"""

"""The memory limit of a trial's process: set before the model is made, and lifted for the last records."""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from typing import Any

from .notes import never_raises

ADDRESS_SPACE_SIZES = ("VmPeak", "VmSize", "VmData")
"""The peak of all address space, its size, and the private writable memory in it, which RLIMIT_DATA counts."""

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""mallopt's parameters, from glibc's malloc.h."""
STRICT_BYTES, ORDINARY_MMAP_BYTES, ORDINARY_TRIM_BYTES = 128 << 10, 32 << 20, 256 << 20
"""malloc's thresholds under a limit and without one, as the worker's (`memory/allocator.py`).

Under a script's own the heap goes on growing, and peaks of equal processes differed by 20 %."""


class MemoryLimit:
    """`limits_bytes` are the limits of the ranks, empty without one; `device` is `cuda` or `cpu`."""

    def __init__(self, limits_bytes: list[int], device: str) -> None:
        self._limits_bytes = limits_bytes
        self._device = device
        self._sizes_before: list[int] | None = None
        """`ADDRESS_SPACE_SIZES` when the limit on a CPU was set; None while there is none."""
        self._limit_bytes = 0
        """The limit of this rank on a GPU; 0 before it is set, and without one."""
        self._limited_gpus: set[int] = set()
        self._peak_bytes: int | None = None

    @property
    def is_on_gpus(self) -> bool:
        """True if GPU memory is limited."""
        return bool(self._limits_bytes) and self._device == "cuda"

    @property
    def is_on_cpu(self) -> bool:
        """True while the memory of a CPU is limited."""
        return self._sizes_before is not None

    @never_raises
    def impose(self, rank: int) -> None:
        """Set this rank's limit: on CUDA the allocator's fraction, on a CPU RLIMIT_DATA above the present VmData.

        On a CPU malloc returns freed tensors at once from here on, so that the limit counts what the tensors need. A
        small product first starts torch's threads, whose stacks would otherwise count.
        """
        if not self._limits_bytes:
            return
        torch: Any = sys.modules["torch"]
        limit_bytes = self._limits_bytes[min(rank, len(self._limits_bytes) - 1)]
        if self._device == "cuda":
            self._limit_bytes = limit_bytes
            # A script that starts its ranks itself names none in the environment.
            local_rank = os.environ.get("LOCAL_RANK")
            self._limit_gpu(int(local_rank) if local_rank else torch.cuda.current_device())
            return
        with torch.enable_grad():
            matrix = torch.ones(1024, 1024, dtype=torch.float32, device="cpu", requires_grad=True)
            (matrix @ matrix).sum().backward()
        del matrix
        _set_thresholds(STRICT_BYTES, STRICT_BYTES)
        os.register_at_fork(after_in_child=_set_ordinary_thresholds)
        self._sizes_before = status_sizes(*ADDRESS_SPACE_SIZES)
        _set_limit(status_sizes("VmData")[0] + limit_bytes)

    @never_raises
    def limit_gpu_of(self, parameter: Any) -> None:
        """Limit the parameter's GPU too: a script may choose a GPU after its first parameter, by `model.to(device)`."""
        if self._limit_bytes and parameter.is_cuda and parameter.get_device() not in self._limited_gpus:
            self._limit_gpu(parameter.get_device())

    def _limit_gpu(self, index: int) -> None:
        cuda = sys.modules["torch"].cuda
        total_bytes = cuda.get_device_properties(index).total_memory
        cuda.set_per_process_memory_fraction(min(1.0, self._limit_bytes / total_bytes), index)
        self._limited_gpus.add(index)

    @never_raises
    def lift(self) -> None:
        """Lift the limit on a CPU, after a last reading of the peak."""
        if self._sizes_before is not None:
            self.peak_bytes()
            self._sizes_before = None
            _set_limit(resource.RLIM_INFINITY)
            _set_ordinary_thresholds()

    def peak_bytes(self) -> int | None:
        """Peak bytes (VmData) since the limit on a CPU was set; after its end, the last peak that was read.

        The kernel keeps a high-water mark of all address space (VmPeak) but none of VmData, so the peak is the growth
        of VmPeak less that of the rest. None without a limit, and until VmPeak rises above its value at that moment.
        """
        if self._sizes_before is not None:
            peak_before_bytes, size_before_bytes, data_before_bytes = self._sizes_before
            peak_bytes, size_bytes, data_bytes = status_sizes(*ADDRESS_SPACE_SIZES)
            others_growth_bytes = max(0, (size_bytes - data_bytes) - (size_before_bytes - data_before_bytes))
            self._peak_bytes = (
                max(0, peak_bytes - size_before_bytes - others_growth_bytes) if peak_bytes > peak_before_bytes else None
            )
        return self._peak_bytes


def _set_limit(data_bytes: int) -> None:
    """Set RLIMIT_DATA, as far as the hard limit allows."""
    _, hard_bytes = resource.getrlimit(resource.RLIMIT_DATA)
    soft_bytes = hard_bytes if data_bytes == resource.RLIM_INFINITY else data_bytes
    resource.setrlimit(
        resource.RLIMIT_DATA,
        (soft_bytes if hard_bytes == resource.RLIM_INFINITY else min(soft_bytes, hard_bytes), hard_bytes),
    )


def _set_ordinary_thresholds() -> None:
    _set_thresholds(ORDINARY_MMAP_BYTES, ORDINARY_TRIM_BYTES)


def _set_thresholds(mmap_bytes: int, trim_bytes: int) -> None:
    """Set glibc's thresholds; another malloc ignores them."""
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(M_MMAP_THRESHOLD, mmap_bytes)
        library.mallopt(M_TRIM_THRESHOLD, trim_bytes)


READ_EVERY_NS = 250_000_000
"""Time between two readings. A reading takes 20 to 50 us, and a screen looks no more often."""
ALWAYS_READ_STEPS = 8
"""Number of first steps that are all read: a short script has no others."""


class MemoryPeaks:
    """Peak bytes since the script began: of the allocator on CUDA, on a CPU of resident memory above the baseline."""

    def __init__(self) -> None:
        self.device: Any = None
        """The device of the optimizer's parameters; None before the first step."""
        self.on_cpu = False
        """True if that device is the CPU, whose work the host's clock times."""
        self._baseline: tuple[int, int] | None = None
        """Resident bytes, and those of files among them, when the first parameter was made; None before."""
        self.due_ns = 0
        """Time of the next reading (CLOCK_MONOTONIC)."""
        self._readings = 0
        self._is_stopped = False

    @property
    def has_model(self) -> bool:
        """True once this process has made a parameter."""
        return self._baseline is not None

    def watch(self, device: Any) -> None:
        """Read the peaks of this device from here on."""
        self.device = device
        self.on_cpu = device.type == "cpu"

    def set_baseline(self) -> None:
        """Set the baseline when the first parameter is made: memory that the imports needed."""
        if self._baseline is None:
            resident_bytes, files_bytes = status_sizes("VmRSS", "RssFile")
            self._baseline = resident_bytes, files_bytes

    def stop(self) -> None:
        """Read no further peaks."""
        self._is_stopped = True

    def read_due(self, now_ns: int) -> dict[str, int]:
        """Read the peaks at the end of a step, and set the time of the next reading; empty once stopped."""
        if self._is_stopped:
            return {}
        self._readings += 1
        if self._readings >= ALWAYS_READ_STEPS:
            self.due_ns = now_ns + READ_EVERY_NS
        return self._read()

    def _read(self) -> dict[str, int]:
        """The peaks by the names of a step record's fields; empty before there are any."""
        kind = getattr(self.device, "type", None)
        if kind == "cuda":
            statistics = sys.modules["torch"].cuda.memory_stats(self.device)
            return {
                "peak_allocated_bytes": statistics.get("allocated_bytes.all.peak", 0),
                "peak_reserved_bytes": statistics.get("reserved_bytes.all.peak", 0),
                "alloc_retries": statistics.get("num_alloc_retries", 0),
            }
        if kind != "cpu" or self._baseline is None:
            return {}
        resident_before_bytes, files_before_bytes = self._baseline
        resident_peak_bytes, files_bytes = status_sizes("VmHWM", "RssFile")
        # A first step reads about 10 MiB of library files, which are not the training's memory.
        above_bytes = max(0, resident_peak_bytes - resident_before_bytes - max(0, files_bytes - files_before_bytes))
        return {"peak_allocated_bytes": above_bytes, "peak_reserved_bytes": above_bytes}


def status_sizes(*names: str) -> list[int]:
    """The sizes of these names in `/proc/self/status`, which are in kB there (proc_pid_status(5)), in bytes."""
    with open("/proc/self/status", "rb") as file:
        status = file.read()
    return [int(status.partition(f"{name}:".encode())[2].split(None, 1)[0]) * 1024 for name in names]

"""The memory limit of a trial's process: set before the model is made, and lifted for the last records."""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from typing import Any

from .notes import never_raises, process


class MemoryLimit:
    """`limit_bytes` is the limit of this rank, 0 for none; `device` is `cuda` or `cpu`."""

    def __init__(self, limit_bytes: int, device: str) -> None:
        self._limit_bytes = limit_bytes
        self._is_on_gpus = limit_bytes > 0 and device == "cuda"
        self._limited_gpus: set[int] = set()
        self._address_space: process.AddressSpacePeak | None = None
        """The peak since the limit on a CPU was set; None while there is none."""
        self._peak_bytes: int | None = None

    @property
    def is_on_cpu(self) -> bool:
        """True while the memory of a CPU is limited."""
        return self._address_space is not None

    @never_raises
    def impose(self) -> None:
        """Set the limit: on CUDA the allocator's fraction, on a CPU RLIMIT_DATA above the present VmData.

        On a CPU malloc returns freed tensors at once from here on, so that the limit counts what the tensors need. A
        small product first starts torch's threads, whose stacks would otherwise count.
        """
        if not self._limit_bytes:
            return
        torch: Any = sys.modules["torch"]
        if self._is_on_gpus:
            # A script that starts its ranks itself names none in the environment.
            local_rank = os.environ.get("LOCAL_RANK")
            self._limit_gpu(int(local_rank) if local_rank else torch.cuda.current_device())
            return
        with torch.enable_grad():
            matrix = torch.ones(1024, 1024, dtype=torch.float32, device="cpu", requires_grad=True)
            (matrix @ matrix).sum().backward()
        del matrix
        # Under thresholds of the script's own the heap goes on growing: peaks of equal processes differed by 20 %.
        _set_thresholds(process.STRICT_BYTES, process.STRICT_BYTES)
        os.register_at_fork(after_in_child=_set_ordinary_thresholds)
        self._address_space = process.AddressSpacePeak()
        process.limit_data(process.status_bytes()["VmData"] + self._limit_bytes)

    @never_raises
    def limit_gpu_of(self, parameter: Any) -> None:
        """Limit the GPU of a parameter that is trained too: a script may choose one later, by `model.to(device)`."""
        if self._is_on_gpus and parameter.is_cuda and parameter.get_device() not in self._limited_gpus:
            self._limit_gpu(parameter.get_device())

    def _limit_gpu(self, index: int) -> None:
        cuda = sys.modules["torch"].cuda
        total_bytes = cuda.get_device_properties(index).total_memory
        cuda.set_per_process_memory_fraction(min(1.0, self._limit_bytes / total_bytes), index)
        self._limited_gpus.add(index)

    @never_raises
    def lift(self) -> None:
        """Lift the limit on a CPU, after a last reading of the peak."""
        if self._address_space is not None:
            self.peak_bytes()
            self._address_space = None
            process.limit_data(resource.RLIM_INFINITY)
            _set_ordinary_thresholds()

    def peak_bytes(self) -> int | None:
        """Peak bytes since the limit on a CPU was set, None if unknown; after its end, the last peak that was read."""
        if self._address_space is not None:
            self._peak_bytes = self._address_space.read()
        return self._peak_bytes


def _set_ordinary_thresholds() -> None:
    _set_thresholds(process.ORDINARY_MMAP_BYTES, process.ORDINARY_TRIM_BYTES)


def _set_thresholds(mmap_bytes: int, trim_bytes: int) -> None:
    """Set glibc's thresholds; another malloc ignores them."""
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(process.M_MMAP_THRESHOLD, mmap_bytes)
        library.mallopt(process.M_TRIM_THRESHOLD, trim_bytes)


READ_EVERY_NS = 250_000_000
"""Time between two readings. A reading takes 20 to 50 us, and a screen looks no more often."""
ALWAYS_READ_STEPS = 8
"""Number of first steps that are all read: a short script has no others."""
NEVER_NS = 1 << 63


class MemoryPeaks:
    """Peak bytes since the script began: of the allocator on CUDA, on a CPU of resident memory above the baseline."""

    def __init__(self) -> None:
        self.device: Any = None
        """The device of the optimizer's parameters; None before the first step."""
        self._first: dict[str, int] | None = None
        """The memory of this process when the first parameter was made; None before."""
        self._due_ns = 0
        """Time of the next reading (CLOCK_MONOTONIC)."""
        self._readings = 0

    @property
    def has_model(self) -> bool:
        """True once this process has made a parameter."""
        return self._first is not None

    @property
    def on_cpu(self) -> bool:
        """True if the parameters are known to be on a CPU."""
        return self.device is not None and self.device.type == "cpu"

    def set_baseline(self) -> None:
        """Set the baseline when the first parameter is made: memory that the imports needed."""
        self._first = process.status_bytes()

    def stop(self) -> None:
        """Read no further peaks."""
        self._due_ns = NEVER_NS

    def read_due(self, now_ns: int) -> dict[str, int]:
        """The peaks at the end of a step, by the names of its record's fields; empty if no reading is due or known."""
        if now_ns < self._due_ns:
            return {}
        self._readings += 1
        if self._readings >= ALWAYS_READ_STEPS:
            self._due_ns = now_ns + READ_EVERY_NS
        kind = getattr(self.device, "type", None)
        if kind == "cuda":
            statistics = sys.modules["torch"].cuda.memory_stats(self.device)
            return {
                "peak_allocated_bytes": statistics.get("allocated_bytes.all.peak", 0),
                "peak_reserved_bytes": statistics.get("reserved_bytes.all.peak", 0),
                "alloc_retries": statistics.get("num_alloc_retries", 0),
            }
        if kind != "cpu" or self._first is None:
            return {}
        above_bytes = process.resident_peak(process.status_bytes(), self._first)
        return {"peak_allocated_bytes": above_bytes, "peak_reserved_bytes": above_bytes}

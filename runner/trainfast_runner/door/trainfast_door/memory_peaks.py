"""The script's memory peaks, read a few times a second. The statistics that a script may read are never reset."""

from __future__ import annotations

import sys
from typing import Any

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

"""The script's memory peaks, read now and then: of its own statistics, which are never reset."""

from __future__ import annotations

import sys
from typing import Any

EVERY = 16
"""Steps between two readings, after each of the first four: a reading takes up to 0.1 ms, a step's hooks 15 us."""
FIRST = 4


class MemoryPeaks:
    """Peak bytes since the script began: of the allocator on CUDA, on a CPU of resident memory above the baseline."""

    def __init__(self) -> None:
        self.device: Any | None = None
        """The device of the optimizer's parameters; None before the first step."""
        self._baseline_bytes: int | None = None

    @property
    def has_model(self) -> bool:
        """True once this process has made a parameter."""
        return self._baseline_bytes is not None

    def set_baseline(self) -> None:
        """Take the memory resident now, when the first parameter is made, as what imports needed."""
        if self._baseline_bytes is None:
            self._baseline_bytes = _status_bytes("VmRSS")

    def read_into(self, record: dict[str, Any]) -> None:
        """Add the peaks to the record of a step whose turn it is."""
        step = record["step"]
        if self.device is None or (step > FIRST and step % EVERY):
            return
        if self.device.type == "cuda":
            statistics = sys.modules["torch"].cuda.memory_stats(self.device)
            record["peak_allocated_bytes"] = statistics.get("allocated_bytes.all.peak")
            record["peak_reserved_bytes"] = statistics.get("reserved_bytes.all.peak")
            record["alloc_retries"] = statistics.get("num_alloc_retries")
        elif self.device.type == "cpu" and self._baseline_bytes is not None:
            peak_bytes = _status_bytes("VmHWM")
            if peak_bytes is not None:
                above_bytes = max(0, peak_bytes - self._baseline_bytes)
                record["peak_allocated_bytes"] = record["peak_reserved_bytes"] = above_bytes


def _status_bytes(name: str) -> int | None:
    """A field of `/proc/self/status`, which is in kB (proc_pid_status(5)); None without one."""
    with open("/proc/self/status", "rb") as file:
        for line in file:
            if line.startswith(name.encode()):
                return int(line.split()[1]) * 1024
    return None

"""The script's memory peaks, read now and then: of its own statistics, which are never reset."""

from __future__ import annotations

import sys
from typing import Any

EVERY = 64
"""Steps between two readings, after each of the first: one takes 20 to 100 us, all other hooks of a step 15."""
FIRST = 8


class MemoryPeaks:
    """Peak bytes since the script began: of the allocator on CUDA, on a CPU of resident memory above the baseline."""

    def __init__(self) -> None:
        self.device: Any = None
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

    def read(self) -> dict[str, int]:
        """The peaks by the names of a step record's fields; empty before there are any."""
        kind = getattr(self.device, "type", None)
        if kind == "cuda":
            statistics = sys.modules["torch"].cuda.memory_stats(self.device)
            return {
                "peak_allocated_bytes": statistics.get("allocated_bytes.all.peak", 0),
                "peak_reserved_bytes": statistics.get("reserved_bytes.all.peak", 0),
                "alloc_retries": statistics.get("num_alloc_retries", 0),
            }
        peak_bytes = _status_bytes("VmHWM") if kind == "cpu" else None
        if peak_bytes is None or self._baseline_bytes is None:
            return {}
        above_bytes = max(0, peak_bytes - self._baseline_bytes)
        return {"peak_allocated_bytes": above_bytes, "peak_reserved_bytes": above_bytes}


def _status_bytes(name: str) -> int | None:
    """A field of `/proc/self/status`, which is in kB (proc_pid_status(5)); None without one."""
    with open("/proc/self/status", "rb") as file:
        for line in file:
            if line.startswith(name.encode()):
                return int(line.split()[1]) * 1024
    return None

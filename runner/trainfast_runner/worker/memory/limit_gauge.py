"""Memory that a limit counts, read around each probe of a batch search."""

from __future__ import annotations

from pathlib import Path

import torch

from .memory_meter import bytes_in_status


class HostLimitGauge:
    """Reads the peak of VmData: the private writable address space, touched or not, that RLIMIT_DATA counts.

    The kernel keeps a high-water mark of all address space (VmPeak) but none of VmData, so the peak is the growth of
    VmPeak less the growth of mapped files. Make the gauge when the limit has just been set. The peak is None until
    VmPeak rises above its value at that moment.
    """

    def __init__(self, limit_bytes: int | None) -> None:
        self.limit_bytes = limit_bytes
        self._first = _status()

    def peak_bytes(self) -> int | None:
        """Growth since the limit was set; None when unknown."""
        status, first_status = _status(), self._first
        if status["VmPeak"] <= first_status["VmPeak"]:
            return None
        files = (status["VmSize"] - status["VmData"]) - (first_status["VmSize"] - first_status["VmData"])
        return max(0, status["VmPeak"] - first_status["VmSize"] - max(0, files))

    def available_bytes(self) -> int | None:
        """Return the limit."""
        return self.limit_bytes


def _status() -> dict[str, int]:
    return bytes_in_status(Path("/proc/self/status").read_bytes())


class CudaLimitGauge:
    """Counts as available the free memory of the device and the memory of the caching allocator, up to its limit."""

    def __init__(self, device: torch.device, limit_bytes: int | None) -> None:
        self._device = device
        self.limit_bytes = limit_bytes

    def peak_bytes(self) -> int | None:
        """Return None: the memory meter reads the bytes that the limit counts."""
        return None

    def available_bytes(self) -> int | None:
        """Most that the allocator may hold now; less when another process takes memory."""
        free_bytes, _ = torch.cuda.mem_get_info(self._device)
        available_bytes = free_bytes + torch.cuda.memory_reserved(self._device)
        return available_bytes if self.limit_bytes is None else min(available_bytes, self.limit_bytes)


LimitGauge = HostLimitGauge | CudaLimitGauge
"""Reads the memory that the limit itself counts, where the memory meter counts other bytes."""


def make_limit_gauge(device: torch.device, limit_bytes: int | None) -> LimitGauge:
    """Make the gauge of this rank's device. Call it when the limit has just been set."""
    return CudaLimitGauge(device, limit_bytes) if device.type == "cuda" else HostLimitGauge(limit_bytes)

"""Memory that the devices can still give when a training fails: used to judge errors that only hint at an OOM."""

from __future__ import annotations

from dataclasses import dataclass

import torch

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
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    if limit_bytes is not None:
        free_bytes = max(0, min(free_bytes, limit_bytes - torch.cuda.memory_allocated(device)))
    return DeviceMemory(free_bytes, free_bytes < max(LOW_BYTES, LOW_SHARE * total_bytes))

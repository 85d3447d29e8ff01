"""How much memory the devices have left when a training fails: errors that only hint at its lack are judged by that."""

from __future__ import annotations

from dataclasses import dataclass

import torch

LOW_BYTES = 1 << 30
LOW_SHARE = 0.05
"""Less than either is low: cuBLAS's handles and most workspaces of cuDNN take less."""


@dataclass(frozen=True)
class Left:
    """Bytes a device could still give, and whether they are so few that a library may have asked for more."""

    free_bytes: int
    is_low: bool


def memory_left(devices: list[torch.device], limit_bytes: int | None) -> Left | None:
    """Memory left on the fullest device; None for a CPU, or when a device does not answer after its own error."""
    if devices[0].type != "cuda":
        return None
    try:
        return min((_left(device, limit_bytes) for device in devices), key=lambda left: left.free_bytes)
    except RuntimeError:
        return None


def _left(device: torch.device, limit_bytes: int | None) -> Left:
    free, total = torch.cuda.mem_get_info(device)
    if limit_bytes is not None:
        free = max(0, min(free, limit_bytes - torch.cuda.memory_allocated(device)))
    return Left(free, free < max(LOW_BYTES, LOW_SHARE * total))

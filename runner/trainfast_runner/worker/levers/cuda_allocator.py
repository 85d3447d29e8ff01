"""The setting of torch's CUDA allocator, which the launch puts in the environment."""

from typing import Any

import torch
from torch import nn


def actual(model: nn.Module) -> dict[str, Any]:
    """Return `allocator`, by the settings of the allocator itself; None without CUDA, and of another allocator."""
    if not torch.cuda.is_initialized() or torch.cuda.get_allocator_backend() != "native":  # type: ignore[no-untyped-call]
        return {"allocator": None}
    settings = torch.cuda.memory._snapshot()["allocator_settings"]
    return {"allocator": "expandable" if settings["expandable_segments"] else "default"}

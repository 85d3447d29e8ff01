"""`dp`: one process with a thread for each GPU, to which the model is copied every step."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel

from ..model.precision import HALF_DTYPE
from ..spec import Knobs
from .base import Strategy, visible_gpus


class DataParallelStrategy(Strategy):
    """torch's nn.DataParallel, which copies the model and scatters the batch from the first GPU every step."""

    def __init__(self, knobs: Knobs, device: torch.device) -> None:
        super().__init__(knobs, device)
        self.devices = visible_gpus()
        self.batch_shares = len(self.devices)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Wrap the model in DataParallel over every GPU of this process."""
        dtype = HALF_DTYPE.get(self.knobs.precision)
        whole = super().wrap(model)
        return DataParallel(whole if dtype is None else Autocast(whole, self.device.type, dtype))

    def actual_fields(self, module: nn.Module) -> dict[str, Any]:
        """Read the devices from the wrapper."""
        fields = super().actual_fields(module)
        return {**fields, "mesh": {"dp": len(module.device_ids)} if isinstance(module, DataParallel) else None}


class Autocast(nn.Module):
    """Enters autocast in the thread that calls the model's forward.

    Autocast's dtype belongs to a thread, and DataParallel's threads enter autocast without one (torch/nn/parallel/
    parallel_apply.py): on a GPU they would compute in fp16 for any dtype of the main thread.
    """

    def __init__(self, model: nn.Module, device_type: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.model = model
        self.device_type = device_type
        self.dtype = dtype

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's own output."""
        with torch.autocast(self.device_type, dtype=self.dtype):
            return self.model(*args, **kwargs)

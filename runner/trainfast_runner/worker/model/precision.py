"""Number formats of a training, and fp16's loss scaling."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

HALF_DTYPE = {"fp16": torch.float16, "bf16": torch.bfloat16}
"""The half format of mixed precision: that of autocast, and of the weights that FSDP gathers."""


class Precision:
    """One value of the `precision` knob, applied to the forward, the backward and the optimizer step."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.device = device
        self.autocast_dtype = HALF_DTYPE.get(name)
        self.scaler = torch.amp.GradScaler(device.type) if name == "fp16" else None
        # Process-wide settings, so that fp32 and tf32 differ under any defaults of torch.
        torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
        torch.backends.cudnn.allow_tf32 = name == "tf32"

    def autocast(self) -> AbstractContextManager[Any]:
        """Context of a forward."""
        if self.autocast_dtype is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.autocast_dtype)

    def backward(self, loss: Tensor) -> None:
        """Accumulate gradients, of the scaled loss under fp16."""
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()  # type: ignore[no-untyped-call]

    def unscale(self, optimizer: Optimizer) -> None:
        """Divide the gradients by the loss scale, before anything reads them."""
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)

    def step(self, optimizer: Optimizer) -> None:
        """Update the weights; fp16 skips the update when a gradient overflowed, and lowers its scale."""
        if self.scaler is None:
            optimizer.step()
        else:
            self.scaler.step(optimizer)
            self.scaler.update()

    def initial_scale(self) -> float | None:
        """The loss scale before the first step; None without scaling."""
        return None if self.scaler is None else float(self.scaler.get_scale())

    def skipped_steps(self) -> int:
        """Number of updates skipped because a gradient overflowed, computed from the fall of the scale.

        Exact until the scale grows, which it does after 2000 steps without an overflow.
        """
        if self.scaler is None:
            return 0
        fallen = self.scaler._init_scale / self.scaler.get_scale()
        return max(0, round(math.log(fallen) / -math.log(self.scaler.get_backoff_factor())))

    def state(self) -> dict[str, Any] | None:
        """The scaler's state at the end of a training; None without scaling."""
        return None if self.scaler is None else self.scaler.state_dict()

    def scale(self) -> Tensor | None:
        """The loss scale as a device tensor, so that copying it does not wait; None without scaling."""
        if self.scaler is None:
            return None
        scale: Tensor | None = self.scaler._scale
        return None if scale is None else scale.detach()


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")

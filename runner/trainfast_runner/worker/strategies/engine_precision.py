"""The number formats and the loss scale of a training by DeepSpeed's engine."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..model.precision import Precision


class EnginePrecision(Precision):
    """No autocast and no scaler of ours; fp16's scale is the engine's."""

    def __init__(self, name: str, device: torch.device) -> None:
        super().__init__("tf32" if name == "tf32" else "fp32", device)
        self.scales = name == "fp16"
        self.engine: Any = None

    def initial_scale(self) -> float | None:
        """Return the engine's loss scale, which DeepSpeed keeps on the host; None without scaling."""
        return float(self.engine.optimizer.loss_scale) if self.scales else None

    def skipped_steps(self) -> int:
        """Return the engine's own count."""
        return int(self.engine.skipped_steps) if self.scales else 0

    def state(self) -> dict[str, Any] | None:
        """Return the last scale, and the number of steps skipped because of an overflow."""
        scale = self.initial_scale()
        return None if scale is None else {"scale": scale, "skipped_steps": self.engine.skipped_steps}

    def scale(self) -> Tensor | None:
        """The loss scale after the last step."""
        scale = self.initial_scale()
        return None if scale is None else torch.full((), scale, device=self.device)

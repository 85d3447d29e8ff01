"""One process, one device."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

WRAPPERS = (DistributedDataParallel, DataParallel)


class Single:
    """No wrapper and no communication: the reference the others are compared with."""

    rank = 0
    ranks = 1
    gradient_factor = 1.0

    def start(self) -> None:
        """Nothing to join."""

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model itself."""
        return model

    def micro_step(self, module: nn.Module, last: bool) -> AbstractContextManager[Any]:
        """No context."""
        return nullcontext()

    def sum(self, value: Tensor) -> Tensor:
        """`value` is the sum already."""
        return value

    def sum_later(self, value: Tensor) -> Any:
        """`value` is the sum already."""
        return None

    def clip(self, parameters: Iterable[Tensor], max_norm: float) -> None:
        """torch's own clipping by the global norm."""
        torch.nn.utils.clip_grad_norm_(parameters, max_norm)

    def facts(self, module: nn.Module) -> dict[str, Any]:
        """The wrapper is read from the module, not from what was asked for."""
        wrapper = next((kind.__name__ for kind in WRAPPERS if isinstance(module, kind)), "none")
        return {
            "wrapper": wrapper,
            "reduce_dtype": None,
            "zero_stage": None,
            "mesh": None,
            "pipeline_stages": None,
        }

    def stop(self) -> None:
        """Nobody to part from."""

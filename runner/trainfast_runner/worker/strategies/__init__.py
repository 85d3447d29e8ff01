"""How ranks share a training: one small file a strategy, all with the shape of `Strategy`."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn


class Strategy(Protocol):
    """What the loop and the session need from a strategy; they know nothing else about it."""

    rank: int
    """This process's data-parallel rank: which slice of the global batch it takes."""
    ranks: int
    """The data-parallel degree: into how many slices the global batch is cut."""
    gradient_factor: float
    """What the loss is multiplied by, so that gradients come out summed over ranks (DDP averages them)."""

    def start(self) -> None:
        """Join the process group; called before any memory is counted."""

    def wrap(self, model: nn.Module) -> nn.Module:
        """The module whose forward the loop calls, with the parameters the optimizer gets."""

    def micro_step(self, module: nn.Module, last: bool) -> AbstractContextManager[Any]:
        """The context of one micro-batch's forward and backward; gradients are exchanged in the `last`."""

    def sum(self, value: Tensor) -> Tensor:
        """`value` summed over the data-parallel ranks, in place, without waiting for a device."""

    def sum_later(self, value: Tensor) -> Any:
        """As `sum`, but returns at once a handle whose `wait()` ends when `value` is ready; None where it is now."""

    def clip(self, parameters: Iterable[Tensor], max_norm: float) -> None:
        """Scale the gradients down to a global norm of at most `max_norm`."""

    def facts(self, module: nn.Module) -> dict[str, Any]:
        """What the live objects are: `wrapper, reduce_dtype, zero_stage, mesh, pipeline_stages`."""

    def stop(self) -> None:
        """Part from the other ranks after the last step. Never called after an error."""


def make_strategy(name: str, device: torch.device) -> Strategy:
    """The strategy called `name` in the knob table."""
    if name == "ddp":
        from .ddp import DataParallel

        return DataParallel(device)
    from .single import Single

    return Single()

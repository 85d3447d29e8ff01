"""How ranks share a training: one small file a strategy, all with the shape of `Strategy`."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from ..catalog import STRATEGIES
from ..invalid import unknown_name

if TYPE_CHECKING:
    # The supervisor imports `offload_scratch` from this package, and has no torch.
    import torch
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from ..loop import Rig
    from ..precision import Precision
    from ..spec import Knobs


class Strategy(Protocol):
    """What the loop and the session need from a strategy; they know nothing else about it."""

    rank: int
    """This process's data-parallel rank: which slice of the global batch it takes."""
    ranks: int
    """The data-parallel degree: into how many slices the global batch is cut."""
    slices: int
    """How many such slices it takes: one but for `dp`, which feeds a GPU with each."""
    devices: list[torch.device]
    """What this process trains on."""
    gradient_factor: float
    """What the loss is multiplied by, so that gradients come out summed over ranks (DDP averages them)."""

    def make_precision(self) -> Precision:
        """The `precision` knob as this strategy applies it."""

    def start(self) -> None:
        """Join the process group; called before any memory is counted."""

    def prepare(self, model: nn.Module, knobs: Knobs) -> tuple[nn.Module, Optimizer]:
        """The module whose forward the loop calls, and the optimizer over its parameters."""

    def accumulate(self, rig: Rig) -> Tensor:
        """Forward and backward of the step's micro-batches; this rank's share of the global mean loss."""

    def backward(self, rig: Rig, loss: Tensor) -> None:
        """Backward of one micro-batch, whose `loss` is divided by the targets of the whole global batch."""

    def update(self, rig: Rig) -> None:
        """The optimizer's step, clipped where asked; gradients are free afterwards."""

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

    def documents(self) -> dict[str, Any]:
        """JSON documents the run directory keeps, by file name; asked for once, after `prepare`."""

    def stop(self) -> None:
        """Part from the other ranks after the last step. Never called after an error."""


def make_strategy(knobs: Knobs, device: torch.device) -> Strategy:
    """The strategy that the knobs name; its file is imported only now."""
    if knobs.strategy not in STRATEGIES:
        raise unknown_name("strategy that this worker runs", knobs.strategy, "strategy", STRATEGIES)
    module, _, name = STRATEGIES[knobs.strategy].path.partition(":")
    made: Strategy = getattr(importlib.import_module(f".{module}", __package__), name)(knobs, device)
    return made

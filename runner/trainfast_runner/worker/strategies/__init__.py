"""Strategies: the ways in which ranks share a training, one small file each with a class that is a `Strategy`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from ..catalog import STRATEGIES

if TYPE_CHECKING:
    # The supervisor imports `offload_scratch` from this package, and has no torch.
    import torch
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from ..data.samples import Batch
    from ..objective import Objective
    from ..precision import Precision
    from ..spec import Knobs

    ForwardBackward = Callable[[list[Batch], Tensor, Objective, Callable[[str], None]], Tensor]


class Strategy(Protocol):
    """Everything that the loop and the start of a training know about a strategy."""

    rank: int
    """This process's data-parallel rank: its slice of the global batch."""
    ranks: int
    """The data-parallel degree: into how many slices the global batch is cut."""
    slices: int
    """Slices of the global batch that this process takes: one, but for `dp`, which feeds a GPU with each."""
    device: torch.device
    """Device of batches and losses."""
    devices: list[torch.device]
    """Every device that this process trains on."""
    precision: Precision
    """The `precision` knob as this strategy applies it."""
    module: nn.Module
    """The wrapped model, whose forward the loop calls; there after `prepare`, as the optimizer is."""
    optimizer: Optimizer

    @property
    def dropout_rank(self) -> int:
        """Added to the seed of dropout: ranks with other samples or other layers drop other activations."""

    def start(self) -> None:
        """Join the process group. Called before any memory is counted."""

    def wrap(self, model: nn.Module) -> nn.Module:
        """Give `model` its weights and its wrapper."""

    def prepare(self, model: nn.Module) -> None:
        """Wrap the model, compile it if asked, and build the optimizer over the parameters of the wrapped model."""

    forward_backward: ForwardBackward | None
    """Replaces the loop's own forward and backward of the micro-batches; None in all strategies but pipelines.

    Takes the micro-batches, the count of targets in the global batch, the objective, and the function that marks
    phases; returns this rank's share of the global mean loss.
    """

    def sync_context(self, last: bool) -> AbstractContextManager[Any]:
        """Context of one micro-batch's forward and backward; gradients are reduced in the `last` one only."""

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradients of one micro-batch, summed over ranks.

        `loss` is already divided by the targets of the whole global batch.
        """

    def optimizer_step(self) -> None:
        """Clip the gradients if asked, update the weights, and free the gradients."""

    def all_reduce(self, value: Tensor) -> Tensor:
        """Sum `value` over the data-parallel ranks, in place, without waiting for a device."""

    def all_reduce_async(self, value: Tensor) -> Any:
        """As `all_reduce`, but return a handle whose `wait()` returns when `value` is ready; None if it already is."""

    def facts(self, module: nn.Module) -> dict[str, Any]:
        """Return `wrapper, reduce_dtype, zero_stage, mesh, pipeline_stages`, read from the live objects."""

    def documents(self) -> dict[str, Any]:
        """JSON documents for the run directory, by file name. Called once, after `prepare`."""

    def stop(self) -> None:
        """Leave the group after the last step. Never called after an error."""


def make_strategy(knobs: Knobs, device: torch.device) -> Strategy:
    """The strategy that the knobs name; its file is imported only now."""
    module, _, name = STRATEGIES[knobs.strategy].path.partition(":")
    made: Strategy = getattr(importlib.import_module(f".{module}", __package__), name)(knobs, device)
    return made

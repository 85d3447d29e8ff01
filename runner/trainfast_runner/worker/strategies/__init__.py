"""How ranks share a training: one small file a strategy, all with the shape of `Strategy`."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

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


STRATEGIES = {
    "single": ("single", "Single"),
    "ddp": ("ddp", "DataParallel"),
    "zero1": ("deepspeed_zero", "DeepSpeedZero"),
    "zero2": ("deepspeed_zero", "DeepSpeedZero"),
    "zero3": ("deepspeed_zero", "DeepSpeedZero"),
    "zero2-offload": ("deepspeed_zero", "DeepSpeedZero"),
    "zero3-offload": ("deepspeed_zero", "DeepSpeedZero"),
    "pp": ("pipeline", "Pipeline"),
    "ddp+pp": ("pipeline", "Pipeline"),
    "dp": ("one_process", "ThreadedDataParallel"),
    "naive-mp": ("one_process", "SpreadLayers"),
    "fsdp": ("fsdp", "FullySharded"),
    "tp": ("tensor_parallel", "TensorParallel"),
    "ddp+tp": ("tensor_parallel", "DataTensorParallel"),
    "fsdp+tp": ("tensor_parallel", "ShardedTensorParallel"),
}
"""File and class of each strategy; a file is imported only when its strategy runs."""


def make_strategy(knobs: Knobs, device: torch.device) -> Strategy:
    """The strategy the knobs name, made from them and this rank's device."""
    if knobs.strategy not in STRATEGIES:
        raise unknown_name("strategy that this worker runs", knobs.strategy, "strategy", tuple(STRATEGIES))
    file, name = STRATEGIES[knobs.strategy]
    made: Strategy = getattr(importlib.import_module(f".{file}", __package__), name)(knobs, device)
    return made

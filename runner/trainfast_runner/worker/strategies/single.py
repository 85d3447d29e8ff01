"""One process, one device."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from ..compilation import compiled
from ..optimizer import build_optimizer
from ..precision import Precision
from ..spec import Knobs
from ..weights import draw

if TYPE_CHECKING:
    from ..loop import Rig

WRAPPERS = (DistributedDataParallel, DataParallel)


class Single:
    """No wrapper and no communication: the reference the others are compared with."""

    rank = 0
    ranks = 1
    slices = 1
    gradient_factor = 1.0

    def __init__(self, knobs: Knobs, device: torch.device) -> None:
        self.knobs = knobs
        self.device = device
        self.devices = [device]

    def make_precision(self) -> Precision:
        """Autocast and the loss scaler are ours."""
        return Precision(self.knobs.precision, self.device)

    def start(self) -> None:
        """Nothing to join."""

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model itself, its weights drawn."""
        draw(model, self.knobs.seed, self.device)
        return model

    def prepare(self, model: nn.Module, knobs: Knobs) -> tuple[nn.Module, Optimizer]:
        """Wrap, build the optimizer over what the wrapping left, and compile where asked."""
        module = self.wrap(model)
        return compiled(module, knobs, self.device), build_optimizer(module, knobs)

    def accumulate(self, rig: Rig) -> Tensor:
        """Micro-batch after micro-batch."""
        from ..micro_steps import accumulate_gradients

        return accumulate_gradients(rig)

    def backward(self, rig: Rig, loss: Tensor) -> None:
        """Gradients come out summed over ranks."""
        rig.precision.backward(loss * self.gradient_factor)

    def update(self, rig: Rig) -> None:
        """Clip, step, free."""
        from ..micro_steps import update

        update(rig)

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

    def documents(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def stop(self) -> None:
        """Nobody to part from."""

"""One process, one device: the strategy that the others inherit from."""

from __future__ import annotations

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
from ..weights import init_weights

if TYPE_CHECKING:
    from . import ForwardBackward

WRAPPERS = (DistributedDataParallel, DataParallel)


class Single:
    """No wrapper and no communication: the reference that the others are compared with."""

    module: nn.Module
    optimizer: Optimizer
    precision: Precision
    rank = 0
    ranks = 1
    slices = 1
    gradient_factor = 1.0
    """Factor on the loss that makes the gradients a sum over ranks; DDP and FSDP average them."""
    forward_backward: ForwardBackward | None = None

    def __init__(self, knobs: Knobs, device: torch.device) -> None:
        self.knobs = knobs
        self.device = device
        self.devices = [device]
        self.precision = Precision(knobs.precision, device)

    @property
    def dropout_rank(self) -> int:
        """The data-parallel rank."""
        return self.rank

    def start(self) -> None:
        """Nothing to join."""

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the model itself, its weights initialized."""
        init_weights(model, self.knobs.seed, self.device)
        return model

    def prepare(self, model: nn.Module) -> None:
        """Wrap, build the optimizer over the parameters that wrapping left, and compile if asked."""
        module = self.wrap(model)
        self.module = compiled(module, self.knobs)
        self.optimizer = build_optimizer(module, self.knobs)

    def sync_context(self, last: bool) -> AbstractContextManager[Any]:
        """No context."""
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Accumulate gradients, of the scaled loss under fp16."""
        self.precision.backward(loss * self.gradient_factor)

    def optimizer_step(self) -> None:
        """Clip, step, free the gradients."""
        if self.knobs.grad_clip > 0:
            self.precision.unscale(self.optimizer)
            self.clip_gradients(self.knobs.grad_clip)
        self.precision.step(self.optimizer)
        self.optimizer.zero_grad(set_to_none=True)

    def clip_gradients(self, max_norm: float) -> None:
        """Scale the gradients down to a global norm of at most `max_norm`."""
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), max_norm)

    def all_reduce(self, value: Tensor) -> Tensor:
        """Return `value`: there is no other rank."""
        return value

    def all_reduce_async(self, value: Tensor) -> Any:
        """Return None: there is no other rank."""
        return None

    def facts(self, module: nn.Module) -> dict[str, Any]:
        """Read the wrapper from the module, not from the knobs."""
        wrapper = next((kind.__name__ for kind in WRAPPERS if isinstance(module, kind)), "none")
        return {
            "wrapper": wrapper,
            "reduce_dtype": None,
            "zero_stage": None,
            "mesh": None,
            "pipeline_stages": None,
        }

    def documents(self) -> dict[str, Any]:
        """No documents."""
        return {}

    def stop(self) -> None:
        """Nothing to leave."""

"""The strategy `single`: one process, one device, no wrapper. All other strategies inherit from it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from ..catalog import STRATEGIES
from ..data.samples import Batch
from ..model.build import compiled, unwrap
from ..model.optimizer import Objective, Precision, build_optimizer
from ..model.weights import init_weights
from ..spec import Knobs

WRAPPERS = (DistributedDataParallel, DataParallel)
"""Classes that wrap a model and have it as `module`."""
ForwardBackward = Callable[[list[Batch], Tensor, Objective, Callable[[str], None]], Tensor]
"""Takes the micro-batches, the count of targets in the global batch, the objective, and the function that marks phases;
returns this rank's share of the global mean loss."""


class Strategy:
    """The interface of a strategy to the loop and the start of a training, here without communication."""

    dp_rank = 0
    """Index of this process's share of the global batch; those of one pipeline or tensor group have the same."""
    dp_degree = 1
    """Number of shares of the global batch."""
    batch_shares = 1
    """Shares of the global batch that this process takes: one, but for `dp`, which feeds a GPU with each."""
    gradient_factor = 1.0
    """Factor on the loss that makes the gradients a sum over ranks; DDP and FSDP average them."""
    module: nn.Module
    """The wrapped model, whose forward the loop calls; set by `prepare`, like the optimizer."""
    optimizer: Optimizer
    forward_backward: ForwardBackward | None = None
    """Replaces the loop's own forward and backward of the micro-batches; None in all strategies but pipelines."""

    def __init__(self, knobs: Knobs, device: torch.device) -> None:
        """`device` is that of batches and losses; `devices` are all that this process trains on."""
        self.knobs = knobs
        self.device = device
        self.devices = [device]
        self.precision = Precision(knobs.precision, device)
        self.enter_phase: Callable[[str, str], None] = lambda phase, detail: None
        """Records a phase of `start`, with its detail; set before it."""

    @property
    def dropout_rank(self) -> int:
        """Added to the seed of dropout: ranks with other samples or other layers drop other activations."""
        return self.dp_rank

    def start(self) -> None:
        """Join the process group. Called before any memory is counted."""

    def wrap(self, model: nn.Module) -> nn.Module:
        """Give `model` its weights and its wrapper."""
        init_weights(model, self.knobs.seed, self.device)
        return model

    def prepare(self, model: nn.Module) -> None:
        """Wrap the model, compile it if asked, and build the optimizer over the parameters of the wrapped model."""
        module = self.wrap(model)
        self.module = compiled(module, self.knobs)
        self.optimizer = build_optimizer(module, self.knobs)

    def sync_context(self, *, is_last: bool) -> AbstractContextManager[Any]:
        """Context of one micro-batch's forward and backward; gradients are reduced in the last one only."""
        module = unwrap(self.module)
        return module.no_sync() if isinstance(module, DistributedDataParallel) and not is_last else nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradients of one micro-batch, summed over ranks.

        `loss` is already divided by the targets of the whole global batch.
        """
        self.precision.backward(loss * self.gradient_factor)

    def optimizer_step(self) -> None:
        """Clip the gradients if asked, update the weights, and free the gradients."""
        if self.knobs.grad_clip > 0:
            self.precision.unscale(self.optimizer)
            self.clip_gradients(self.knobs.grad_clip)
        self.precision.step(self.optimizer)
        self.optimizer.zero_grad(set_to_none=True)

    def clip_gradients(self, max_norm: float) -> None:
        """Scale the gradients down to a norm of at most `max_norm`, over all slices if they are slices."""
        parameters = list(self.live_parameters(self.module))
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        # The norm of DTensors is a partial sum until `full_tensor`.
        whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, whole)

    def live_parameters(self, module: nn.Module) -> Iterable[Tensor]:
        """The parameters that the optimizer updates."""
        return module.parameters()

    def data_group(self) -> Any:
        """The process group of the ranks whose samples differ; None for all ranks."""
        return None

    def all_reduce(self, value: Tensor) -> Tensor:
        """Sum `value` over the ranks whose samples differ, in place, without waiting for a device."""
        if self.dp_degree > 1:
            dist.all_reduce(value, group=self.data_group())
        return value

    def all_reduce_async(self, value: Tensor) -> Any:
        """Begin `all_reduce`; return a handle whose `wait()` returns when `value` is ready, or None if ready now."""
        return dist.all_reduce(value, group=self.data_group(), async_op=True) if self.dp_degree > 1 else None

    def actual_fields(self, module: nn.Module) -> dict[str, Any]:
        """Return `wrapper`, and those fields of `train_state.NULL_UNLESS_READ` that the live objects have."""
        return {"wrapper": next((kind.__name__ for kind in WRAPPERS if isinstance(module, kind)), "none")}

    def run_documents(self) -> dict[str, Any]:
        """JSON documents for the run directory, by file name. Called once, after `prepare`."""
        return {}

    def stop(self) -> None:
        """Wait after the last step until no rank needs this one any more; the group ends with the process.

        Never called after an error.
        """
        if dist.is_initialized():
            dist.barrier()


def make_strategy(knobs: Knobs, device: torch.device) -> Strategy:
    """Make the strategy that the knobs name; its file is imported only now."""
    module, _, name = STRATEGIES[knobs.strategy].path.partition(":")
    strategy: Strategy = getattr(importlib.import_module(f".{module}", __package__), name)(knobs, device)
    return strategy


def visible_gpus() -> list[torch.device]:
    """The GPUs of this process."""
    return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]


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

    def scale(self) -> Tensor | None:
        """The loss scale after the last step."""
        scale = self.initial_scale()
        return None if scale is None else torch.full((), scale, device=self.device)

"""Every rank holds the whole model; gradients are averaged in buckets while the backward runs."""

from __future__ import annotations

import os
import socket
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..model.compilation import unwrap
from ..model.precision import dtype_name
from ..spec import Knobs
from .base import Strategy


class DistributedDataParallelStrategy(Strategy):
    """torch's DistributedDataParallel over NCCL, or over gloo on CPU."""

    def __init__(self, knobs: Knobs, device: torch.device) -> None:
        super().__init__(knobs, device)
        self.dp_rank = int(os.environ["RANK"])
        self.dp_degree = int(os.environ["WORLD_SIZE"])
        self.gradient_factor = float(self.dp_degree)

    def start(self) -> None:
        """Join the group that torchrun describes in the environment."""
        join_group(self.device)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Put the model in DistributedDataParallel with torch's defaults."""
        return DistributedDataParallel(
            super().wrap(model), device_ids=[self.device] if self.device.type == "cuda" else None
        )

    def sync_context(self, *, is_last: bool) -> AbstractContextManager[Any]:
        """Reduce the gradients in the last micro-batch only."""
        if is_last:
            return nullcontext()
        wrapped = unwrap(self.module)
        assert isinstance(wrapped, DistributedDataParallel)
        return wrapped.no_sync()

    def all_reduce(self, value: Tensor) -> Tensor:
        """Sum over all ranks; on CUDA the sum is queued like any kernel."""
        dist.all_reduce(value)
        return value

    def all_reduce_async(self, value: Tensor) -> Any:
        """Sum over all ranks in the background."""
        return dist.all_reduce(value, async_op=True)

    def actual_fields(self, module: nn.Module) -> dict[str, Any]:
        """Return the wrapper, and the gradients' dtype, in which DDP reduces."""
        dtype = next(module.parameters()).dtype
        return {**super().actual_fields(module), "reduce_dtype": dtype_name(dtype)}

    def stop(self) -> None:
        """Wait until no rank needs this one any more; the group ends with the process."""
        dist.barrier()


def join_group(device: torch.device) -> None:
    """Join the group of all ranks that torchrun describes in the environment, by NCCL, or by gloo on CPU.

    Does nothing in a process that has joined it for an earlier setting.
    """
    if dist.is_initialized():
        return
    if device.type == "cuda":
        dist.init_process_group("nccl", device_id=device)
        return
    if any(name == "lo" for _, name in socket.if_nameindex()):
        # All ranks are on this machine. By default gloo needs the host's name to resolve.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo")

"""Every rank holds the whole model; gradients are averaged in buckets while the backward runs."""

from __future__ import annotations

import os
import socket
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ..model.optimizer import HALF_DTYPE, dtype_name
from ..spec import Knobs
from .base import Strategy, visible_gpus


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

    def actual_fields(self, module: nn.Module) -> dict[str, Any]:
        """Return the wrapper, and the gradients' dtype, in which DDP reduces."""
        dtype = next(module.parameters()).dtype
        return {**super().actual_fields(module), "reduce_dtype": dtype_name(dtype)}


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


class DataParallelStrategy(Strategy):
    """torch's nn.DataParallel, which copies the model and scatters the batch from the first GPU every step."""

    def __init__(self, knobs: Knobs, device: torch.device) -> None:
        super().__init__(knobs, device)
        self.devices = visible_gpus()
        self.batch_shares = len(self.devices)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Wrap the model in DataParallel over every GPU of this process."""
        dtype = HALF_DTYPE.get(self.knobs.precision)
        whole = super().wrap(model)
        return DataParallel(whole if dtype is None else Autocast(whole, self.device.type, dtype))

    def actual_fields(self, module: nn.Module) -> dict[str, Any]:
        """Read the devices from the wrapper."""
        fields = super().actual_fields(module)
        return {**fields, "mesh": {"dp": len(module.device_ids)} if isinstance(module, DataParallel) else None}


class Autocast(nn.Module):
    """Enters autocast in the thread that calls the model's forward.

    Autocast's dtype belongs to a thread, and DataParallel's threads enter autocast without one (torch/nn/parallel/
    parallel_apply.py): on a GPU they would compute in fp16 for any dtype of the main thread.
    """

    def __init__(self, model: nn.Module, device_type: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.model = model
        self.device_type = device_type
        self.dtype = dtype

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's own output."""
        with torch.autocast(self.device_type, dtype=self.dtype):
            return self.model(*args, **kwargs)


class MeshStrategy(Strategy):
    """The base of tensor parallelism and pipelines: their mesh, and sums over the ranks whose samples differ."""

    mesh: DeviceMesh
    """The mesh of dp x `degree` ranks, made by `start`; ranks that share a model are neighbours."""

    def __init__(self, knobs: Knobs, device: torch.device, axis: str, degree: int) -> None:
        """`axis` is the mesh axis along which the model is cut, `degree` the number of ranks along it."""
        super().__init__(knobs, device)
        self.axis = axis
        self.degree = degree
        self.dp_rank, self.axis_rank = divmod(int(os.environ.get("RANK", "0")), degree)
        self.dp_degree = int(os.environ.get("WORLD_SIZE", "1")) // degree

    def start(self) -> None:
        """Join the group that torchrun describes, and make the mesh."""
        join_group(self.device)
        self.mesh = init_device_mesh(self.device.type, (self.dp_degree, self.degree), mesh_dim_names=("dp", self.axis))

    def data_group(self) -> Any:
        """The group of the axis `dp`."""
        return self.mesh.get_group("dp")

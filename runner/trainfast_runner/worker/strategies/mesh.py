"""Ranks on a mesh of two axes: `dp`, whose ranks take different samples, and an axis along which a model is cut."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..spec import Knobs
from .base import Strategy
from .ddp import join_group


class MeshStrategy(Strategy):
    """The base of tensor parallelism and pipelines: their mesh, and sums over the ranks whose samples differ."""

    mesh: DeviceMesh
    """A mesh of dp x `degree` ranks, there after `start`; ranks that share a model are neighbours."""

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

    def all_reduce(self, value: Tensor) -> Tensor:
        """Sum over the ranks whose samples differ."""
        if self.dp_degree > 1:
            dist.all_reduce(value, group=self.mesh.get_group("dp"))
        return value

    def stop(self) -> None:
        """Wait until no rank needs this one any more; the group ends with the process."""
        dist.barrier()

"""FSDP2: parameters, gradients and optimizer states sharded over the ranks, and gathered block by block."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from ..model.optimizer import HALF_DTYPE, dtype_name
from ..model.weights import Part, init_in_turn, transformer_blocks
from ..spec import Knobs
from .base import Strategy
from .ddp import DistributedDataParallelStrategy


class FullyShardedStrategy(Strategy):
    """The reduction and facts that `fsdp` and `fsdp+tp` share."""

    def sync_context(self, *, is_last: bool) -> AbstractContextManager[Any]:
        """Keep the gradients whole and unreduced on each rank until the last micro-batch."""
        module: Any = self.module
        module.set_requires_gradient_sync(is_last)
        return nullcontext()

    def actual_fields(self, module: nn.Module) -> dict[str, Any]:
        """Read `wrapper, mesh, reduce_dtype, reshard` from the parameters and from FSDP's own state."""
        from torch.distributed.fsdp import FSDPModule

        parameter = next(module.parameters())
        group = _block_group(module)
        reduce_dtype = getattr(group, "_reduce_dtype", None) or parameter.dtype
        return {
            **super().actual_fields(module),
            "wrapper": FSDPModule.__name__ if isinstance(module, FSDPModule) else "none",
            "mesh": mesh_of(parameter),
            "reduce_dtype": dtype_name(reduce_dtype),
            "reshard": None if group is None else "off" if group.post_forward_mesh_info is None else "on",
        }


class ShardedDataParallel(FullyShardedStrategy, DistributedDataParallelStrategy):
    """`fully_shard` on each transformer block and on the rest."""

    def wrap(self, model: nn.Module) -> nn.Module:
        """Shard the model in place; a block is whole only between its initialization and its sharding."""
        mesh = init_device_mesh(self.device.type, (self.dp_degree,), mesh_dim_names=("dp",))
        shard_in_turn(model, init_in_turn(model, self.knobs.seed, self.device), mesh, self.knobs)
        return model


def shard_in_turn(model: nn.Module, parts: Iterable[Part], mesh: DeviceMesh, knobs: Knobs) -> None:
    """Shard the blocks of `model` over the one-dimensional `mesh` as they come, in place, and then the rest.

    In mixed precision the gathered weights are in half precision already, and gradients are reduced in fp32; autocast
    stays for the operations that it keeps in fp32.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    transformer_blocks(model)
    half_dtype = HALF_DTYPE.get(knobs.precision)
    policy = MixedPrecisionPolicy(param_dtype=half_dtype, reduce_dtype=torch.float32 if half_dtype else None)
    for part in parts:
        if part.block is not None:
            fully_shard(part.block, mesh=mesh, reshard_after_forward=knobs.reshard == "on", mp_policy=policy)
    # By torch's default the root's parameters stay gathered: the backward needs them first.
    fully_shard(model, mesh=mesh, mp_policy=policy)


def mesh_of(tensor: Tensor) -> dict[str, int] | None:
    """The axes of a DTensor's device mesh and their sizes; None for a plain tensor."""
    if not isinstance(tensor, DTensor) or tensor.device_mesh.mesh_dim_names is None:
        return None
    return dict(zip(tensor.device_mesh.mesh_dim_names, tensor.device_mesh.shape, strict=True))


def _block_group(module: nn.Module) -> Any:
    """FSDP's private record of a block's parameters; None if this torch has it elsewhere."""
    blocks: list[Any] = transformer_blocks(module)
    try:
        return blocks[0]._get_fsdp_state()._fsdp_param_group
    except AttributeError:
        return None

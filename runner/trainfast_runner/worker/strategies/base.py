"""The strategy `single`: one process, one device, no wrapper. All other strategies inherit from it.

Under data parallelism every rank has the whole model and averages gradients in buckets. FSDP2 shards parameters,
gradients and optimizer states over the ranks, and gathers them block by block.
"""

import importlib
import math
import os
import socket
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from ..catalog import STRATEGIES
from ..data.samples import Batch
from ..model.build import compiled, unwrap
from ..model.optimizer import HALF_DTYPE, Objective, Precision, build_optimizer, dtype_name
from ..model.weights import Part, init_in_turn, init_weights, transformer_blocks
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
        dtype = next(parameter for parameter in module.parameters() if parameter.requires_grad).dtype
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
    """The mesh of dp x pp x tp ranks, made by `start`, without the axes that the strategy lacks.

    Ranks that share a model are neighbours, those of one tp group the nearest.
    """
    degrees: dict[str, int]
    """Number of ranks along each axis that cuts the model."""
    axis_ranks: dict[str, int]
    """Index of this rank along each axis that cuts the model."""

    def __init__(self, knobs: Knobs, device: torch.device) -> None:
        super().__init__(knobs, device)
        self.degrees = {axis: getattr(knobs, f"{axis}_degree") for axis in STRATEGIES[knobs.strategy].model_axes}
        self.axis_ranks = {}
        self.dp_rank = int(os.environ.get("RANK", "0"))
        for axis, degree in reversed(self.degrees.items()):
            self.dp_rank, self.axis_ranks[axis] = divmod(self.dp_rank, degree)
        self.dp_degree = int(os.environ.get("WORLD_SIZE", "1")) // math.prod(self.degrees.values())

    def start(self) -> None:
        """Join the group that torchrun describes, and make the mesh."""
        join_group(self.device)
        sizes = {"dp": self.dp_degree, **self.degrees}
        self.mesh = init_device_mesh(self.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))

    def data_group(self) -> Any:
        """The group of the axis `dp`."""
        return self.mesh.get_group("dp")


class FullyShardedStrategy(Strategy):
    """The reduction and facts that `fsdp`, `fsdp+tp` and `fsdp+tp+pp` share."""

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
        shard_in_turn([model], init_in_turn(model, self.knobs.seed, self.device), mesh, self.knobs)
        return model


def shard_in_turn(roots: list[nn.Module], parts: Iterable[Part], mesh: DeviceMesh, knobs: Knobs) -> None:
    """Shard blocks over the one-dimensional `mesh` as they come, in place, and then the rest of their `roots`.

    The roots are the model, or this rank's stages of it.

    In mixed precision the gathered weights are in half precision already, and gradients are reduced in fp32; autocast
    stays for the operations that it keeps in fp32.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    for root in roots:
        transformer_blocks(root)
    half_dtype = HALF_DTYPE.get(knobs.precision)
    policy = MixedPrecisionPolicy(param_dtype=half_dtype, reduce_dtype=torch.float32 if half_dtype else None)
    for part in parts:
        if part.block is not None:
            fully_shard(part.block, mesh=mesh, reshard_after_forward=knobs.reshard == "on", mp_policy=policy)
    # By torch's default the root's parameters stay gathered: the backward needs them first.
    for root in roots:
        fully_shard(root, mesh=mesh, mp_policy=policy)


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

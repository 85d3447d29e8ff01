"""Tensor parallelism: each layer's matrices are cut over ranks that train on the same samples.

Alone, or inside data parallelism on a two-dimensional mesh with neighbouring ranks along `tp`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ..model.optimizer import build_optimizer, dtype_name
from ..model.weights import Part, init_in_turn
from ..spec import Knobs
from .base import Strategy
from .ddp import MeshStrategy
from .fsdp import clip_slices, mesh_of, shard_in_turn, sharded_fields, sync_in_last
from .tensor_plan import cut_in_turn, plan_for


class TensorParallel(MeshStrategy):
    """`tp`: one model over all ranks."""

    def __init__(self, knobs: Knobs, device: torch.device) -> None:
        super().__init__(knobs, device, "tp", knobs.tp_degree)
        self.gradient_factor = float(self.dp_degree)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Cut the model in place; a block is whole only between its initialization and its cut."""
        for _ in self.cut_in_turn(model):
            pass
        return model

    def cut_in_turn(self, model: nn.Module) -> Iterator[Part]:
        """Yield the parts of `model`, each initialized and cut."""
        plan = plan_for(model, self.degree)
        return cut_in_turn(model, plan, self.mesh["tp"], init_in_turn(model, self.knobs.seed, self.device))

    def all_reduce_async(self, value: Tensor) -> Any:
        """Sum over the ranks whose samples differ, in the background."""
        if self.dp_degree == 1:
            return None
        return dist.all_reduce(value, group=self.mesh.get_group("dp"), async_op=True)

    def clip_gradients(self, max_norm: float) -> None:
        """Clip by the norm over all slices."""
        clip_slices(self.module.parameters(), max_norm)

    def actual_fields(self, module: nn.Module) -> dict[str, Any]:
        """Read wrapper and mesh from the parameters."""
        return {**super().actual_fields(module), **tensor_fields(module.parameters())}


class DataTensorParallel(TensorParallel):
    """`ddp+tp`: the same slice on every data-parallel rank, its gradients averaged by DistributedDataParallel.

    DDP works on plain tensors only: the model has them, and the optimizer has DTensors over the same storage.
    """

    plain_and_dtensor: list[tuple[nn.Parameter, nn.Parameter]]
    """Each slice twice: the plain parameter that DDP reduces, and the DTensor over its storage."""

    def prepare(self, model: nn.Module) -> None:
        """Put the model in DDP over the `dp` axis, and build the optimizer over the DTensors."""
        self.module = self.wrap(model)
        self.optimizer = build_optimizer(nn.ParameterList(whole for _, whole in self.plain_and_dtensor), self.knobs)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Cut the model, and give DDP the plain slices."""
        super().wrap(model)
        plain: dict[nn.Parameter, nn.Parameter] = {}
        for module in model.modules():
            for name, parameter in list(module._parameters.items()):
                if isinstance(parameter, DTensor):
                    if parameter not in plain:
                        local = nn.Parameter(parameter.to_local().detach(), requires_grad=parameter.requires_grad)
                        local.whole_numel = parameter.numel()
                        plain[parameter] = local
                    module._parameters[name] = plain[parameter]
        self.plain_and_dtensor = [(local, whole) for whole, local in plain.items()]
        devices = [self.device] if self.device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=devices, process_group=self.mesh.get_group("dp"))

    def sync_context(self, *, is_last: bool) -> AbstractContextManager[Any]:
        """Reduce the gradients in the last micro-batch only."""
        assert isinstance(self.module, DistributedDataParallel)
        return nullcontext() if is_last else self.module.no_sync()

    def optimizer_step(self) -> None:
        """Give the reduced gradients to the DTensors, and free both after the step."""
        for local, whole in self.plain_and_dtensor:
            if local.grad is not None and isinstance(whole, DTensor):
                whole.grad = DTensor.from_local(local.grad, whole.device_mesh, whole.placements, run_check=False)
        super().optimizer_step()
        for local, _ in self.plain_and_dtensor:
            local.grad = None

    def clip_gradients(self, max_norm: float) -> None:
        """Clip through the DTensors, which know which of the gradients are slices."""
        clip_slices([whole for _, whole in self.plain_and_dtensor], max_norm)

    def actual_fields(self, module: nn.Module) -> dict[str, Any]:
        """Read DDP from the module, and the rest from the DTensors over its storage."""
        fields = Strategy.actual_fields(self, module)
        tensor_axis = tensor_fields(whole for _, whole in self.plain_and_dtensor)
        dtype = next(module.parameters()).dtype
        return {
            **fields,
            **tensor_axis,
            "wrapper": joined(tensor_axis["wrapper"], fields["wrapper"]),
            "mesh": {"dp": dist.get_world_size(self.mesh.get_group("dp")), **(tensor_axis["mesh"] or {})},
            "reduce_dtype": dtype_name(dtype),
        }


class ShardedTensorParallel(TensorParallel):
    """`fsdp+tp`: each slice is cut again over the data-parallel ranks."""

    def wrap(self, model: nn.Module) -> nn.Module:
        """Cut by tensor parallelism, then shard the slices by FSDP over the `dp` axis."""
        shard_in_turn(model, self.cut_in_turn(model), self.mesh["dp"], self.knobs)
        return model

    def sync_context(self, *, is_last: bool) -> AbstractContextManager[Any]:
        """Keep the gradients unreduced on each rank until the last micro-batch."""
        return sync_in_last(self.module, is_last=is_last)

    def actual_fields(self, module: nn.Module) -> dict[str, Any]:
        """Read FSDP's state, and the parameters."""
        fields = sharded_fields(module)
        tensor_axis = tensor_fields(module.parameters())
        return {**super().actual_fields(module), **fields, "wrapper": joined(tensor_axis["wrapper"], fields["wrapper"])}


def tensor_fields(parameters: Iterable[Tensor]) -> dict[str, Any]:
    """Read `wrapper` and `mesh` from parameters that should be slices along a mesh axis `tp`."""
    meshes = [mesh_of(parameter) for parameter in parameters]
    is_sliced = all(mesh is not None and "tp" in mesh for mesh in meshes)
    return {"wrapper": DTensor.__name__ if is_sliced else "none", "mesh": meshes[0]}


def joined(*wrappers: str) -> str:
    """Join several wrappers to one name."""
    return "+".join(wrapper for wrapper in wrappers if wrapper != "none") or "none"

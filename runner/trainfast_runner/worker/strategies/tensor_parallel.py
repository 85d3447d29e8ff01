"""Tensor parallelism: each layer's matrices cut over the ranks, which all train on the same samples.

Alone, or inside data parallelism on a two-dimensional mesh whose inner axis, `tp`, is the fast one.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..invalid import InvalidInput
from ..optimizer import build_optimizer
from ..spec import Knobs
from ..weights import Part, drawn_in_turn
from .ddp import join_group
from .fsdp import clip_slices, mesh_of, shard_in_turn, sharded_facts
from .single import Single
from .tensor_plan import plan_for
from .tensor_slices import cut_in_turn

if TYPE_CHECKING:
    from ..loop import Rig


class TensorParallel(Single):
    """`tp`: one model over all ranks."""

    mesh: DeviceMesh

    def __init__(self, knobs: Knobs, device: torch.device) -> None:
        super().__init__(knobs, device)
        world, self.degree = int(os.environ.get("WORLD_SIZE", "1")), knobs.tp_degree
        self.ranks = world // self.degree
        self.rank = int(os.environ.get("RANK", "0")) // self.degree
        self.gradient_factor = float(self.ranks)
        if world % self.degree or (self.ranks > 1) != (knobs.strategy != "tp"):
            raise InvalidInput(
                f"{world} processes are not a mesh for strategy={knobs.strategy} with tp_degree={self.degree}",
                "tp_degree",
            )

    def start(self) -> None:
        """Join the group, and lay it out with the ranks that share a model side by side."""
        join_group(self.device)
        self.mesh = init_device_mesh(self.device.type, (self.ranks, self.degree), mesh_dim_names=("dp", "tp"))

    def wrap(self, model: nn.Module) -> nn.Module:
        """The same model, its parameters now slices; a block is whole only between being drawn and being cut."""
        for _ in self.cut_in_turn(model):
            pass
        return model

    def cut_in_turn(self, model: nn.Module) -> Iterator[Part]:
        """The parts of `model`, each as soon as it is slices."""
        plan = plan_for(model, self.degree)
        return cut_in_turn(model, plan, self.mesh["tp"], drawn_in_turn(model, self.knobs.seed, self.device))

    def sum(self, value: Tensor) -> Tensor:
        """Over the ranks whose samples differ."""
        if self.ranks > 1:
            dist.all_reduce(value, group=self.mesh.get_group("dp"))
        return value

    def sum_later(self, value: Tensor) -> Any:
        """Over the ranks whose samples differ, in the background."""
        if self.ranks == 1:
            return None
        return dist.all_reduce(value, group=self.mesh.get_group("dp"), async_op=True)

    def clip(self, parameters: Iterable[Tensor], max_norm: float) -> None:
        """By the norm over all slices."""
        clip_slices(parameters, max_norm)

    def facts(self, module: nn.Module) -> dict[str, Any]:
        """Read from the parameters."""
        return {**super().facts(module), **tensor_facts(module.parameters())}

    def stop(self) -> None:
        """Wait until no rank needs this one any more; the group goes with the process."""
        dist.barrier()


class DataTensorParallel(TensorParallel):
    """`ddp+tp`: the same slice on every data-parallel rank, its gradients averaged by DistributedDataParallel.

    DDP knows plain tensors only: the model trains on the slices' own storage, and the optimizer sees that as DTensors.
    """

    held: list[tuple[nn.Parameter, nn.Parameter]]
    """Each slice as the plain parameter DDP reduces, and as the DTensor over the same storage."""

    def prepare(self, model: nn.Module, knobs: Knobs) -> tuple[nn.Module, Optimizer]:
        """The model in DDP over the `dp` axis, the optimizer over the DTensors."""
        module = self.wrap(model)
        return module, build_optimizer(nn.ParameterList(whole for _, whole in self.held), knobs)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Cut, then show DDP the plain slices."""
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
        self.held = [(local, whole) for whole, local in plain.items()]
        devices = [self.device] if self.device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=devices, process_group=self.mesh.get_group("dp"))

    def micro_step(self, module: nn.Module, last: bool) -> AbstractContextManager[Any]:
        """All but the last micro-batch only accumulate."""
        assert isinstance(module, DistributedDataParallel)
        return nullcontext() if last else module.no_sync()

    def update(self, rig: Rig) -> None:
        """Hand the reduced gradients to the DTensors, and free both after the step."""
        for local, whole in self.held:
            if local.grad is not None and isinstance(whole, DTensor):
                whole.grad = DTensor.from_local(local.grad, whole.device_mesh, whole.placements, run_check=False)
        super().update(rig)
        for local, _ in self.held:
            local.grad = None

    def clip(self, parameters: Iterable[Tensor], max_norm: float) -> None:
        """The DTensors know which of the gradients are slices."""
        super().clip([whole for _, whole in self.held], max_norm)

    def facts(self, module: nn.Module) -> dict[str, Any]:
        """DDP from the module, the rest from the DTensors over its storage."""
        found = Single.facts(self, module)
        inner = tensor_facts(whole for _, whole in self.held)
        dtype = next(module.parameters()).dtype
        return {
            **found,
            **inner,
            "wrapper": joined(inner["wrapper"], found["wrapper"]),
            "mesh": {"dp": dist.get_world_size(self.mesh.get_group("dp")), **(inner["mesh"] or {})},
            "reduce_dtype": str(dtype).removeprefix("torch."),
        }


class ShardedTensorParallel(TensorParallel):
    """`fsdp+tp`: each slice cut again over the data-parallel ranks."""

    def wrap(self, model: nn.Module) -> nn.Module:
        """Cut by tensor parallelism, then shard the slices by FSDP over the `dp` axis."""
        shard_in_turn(model, self.cut_in_turn(model), self.mesh["dp"], self.knobs)
        return model

    def micro_step(self, module: Any, last: bool) -> AbstractContextManager[Any]:
        """Until the last micro-batch the gradients stay unreduced on each rank."""
        module.set_requires_gradient_sync(last)
        return nullcontext()

    def facts(self, module: nn.Module) -> dict[str, Any]:
        """FSDP's, beside what the parameters are."""
        found = sharded_facts(module)
        inner = tensor_facts(module.parameters())
        return {**super().facts(module), **found, "wrapper": joined(inner["wrapper"], found["wrapper"])}


def tensor_facts(parameters: Iterable[Tensor]) -> dict[str, Any]:
    """`wrapper` and `mesh` of parameters that should be slices along a mesh axis `tp`."""
    meshes = [mesh_of(parameter) for parameter in parameters]
    sliced = all(mesh is not None and "tp" in mesh for mesh in meshes)
    return {"wrapper": DTensor.__name__ if sliced else "none", "mesh": meshes[0]}


def joined(*wrappers: str) -> str:
    """Several wrappers as one name."""
    return "+".join(wrapper for wrapper in wrappers if wrapper != "none") or "none"

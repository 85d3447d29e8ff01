"""One rank's slice of a tensor-parallel model in a single process, cut by the worker's own plan and exchanges."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from ..strategies.tensor_plan import Slice, plan_for
from ..strategies.tensor_slices import add_exchanges


def keep_one_slice(model: nn.Module, degree: int, device_type: str) -> None:
    """Cut `model`, which has no memory yet, into `degree` slices and keep the first, in place.

    The exchanges go through torch's fake process group, which has no other processes. Parameters are plain tensors
    here and DTensors at rest in the strategy: both have the same bytes.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        # The group of another model that this process has traced, perhaps in other slices.
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=degree, store=FakeStore())
    mesh = init_device_mesh(device_type, (degree,), mesh_dim_names=("tp",))
    plan = plan_for(model, degree)
    add_exchanges(model, plan, mesh)
    slices: dict[int, nn.Parameter] = {}
    for name, module in model.named_modules():
        for key, whole in module._parameters.items():
            if whole is None:
                continue
            if id(whole) not in slices:
                slices[id(whole)] = _slice(whole, plan.slices.get(f"{name}.{key}"), degree)
            module._parameters[key] = slices[id(whole)]


def _slice(whole: nn.Parameter, cut: Slice | None, degree: int) -> nn.Parameter:
    if cut is None:
        return whole
    shape = list(whole.shape)
    shape[cut.dim] //= degree
    return nn.Parameter(torch.empty(shape, dtype=whole.dtype, device=whole.device), whole.requires_grad)

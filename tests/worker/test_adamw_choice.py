"""The loop of AdamW that torch chooses for slices, which the result reads from the live optimizer."""

import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from worker_knobs import worker_knobs

from trainfast_runner.worker.model.optimizer import build_optimizer, implementation


@pytest.fixture
def slices():
    """One parameter, cut over two ranks of which one is here."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    yield nn.ParameterList([nn.Parameter(DTensor.from_local(torch.ones(2, 4), mesh, [Shard(0)]))])
    dist.destroy_process_group()


@pytest.mark.parametrize(("device", "loop"), [("cuda", "loop"), ("cpu", "foreach")])
def test_adamw_on_slices_is_foreach_where_torch_has_foreach_kernels(slices, monkeypatch, device, loop):
    """torch's list of devices with such kernels is played: the slices of this test, on the CPU, are in it or not."""
    # `torch.optim` deletes the name of this module.
    chooser = sys.modules[torch.optim.Optimizer.__module__]
    monkeypatch.setattr(chooser, "_get_foreach_kernels_supported_devices", lambda: [device])
    assert implementation(build_optimizer(slices, worker_knobs())) == loop

"""The memory limit of a script's rank on GPUs, with stand-ins for the calls of torch that reach the driver."""

from types import SimpleNamespace

import pytest
import torch

from trainfast_runner.door.trainfast_door.memory_limit import MemoryLimit
from trainfast_runner.door.trainfast_door.step_hooks import ModelHooks

GIB = 1 << 30


@pytest.fixture
def limited(monkeypatch):
    """The fractions that were set, by GPU; there are four of 80 GiB, and the script has chosen the third."""
    fractions = {}
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(total_memory=80 * GIB))
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda fraction, index: fractions.update({index: fraction})
    )
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    return fractions


def parameter_on(gpu):
    """A parameter on a GPU, as far as the limit looks at it."""
    return SimpleNamespace(is_cuda=True, get_device=lambda: gpu)


def test_rank_that_the_script_started_is_limited_on_the_gpu_it_chose(limited):
    MemoryLimit([20 * GIB], "cuda").impose(rank=0)
    assert limited == {2: 0.25}


def test_rank_of_a_launcher_is_limited_on_its_own_gpu(limited, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    MemoryLimit([20 * GIB, 40 * GIB], "cuda").impose(rank=1)
    assert limited == {1: 0.5}


def test_gpu_that_the_script_chose_after_its_first_parameter_is_limited_too(limited):
    limit = MemoryLimit([20 * GIB], "cuda")
    limit.impose(rank=0)
    limit.limit_gpu_of(parameter_on(3))
    assert limited == {2: 0.25, 3: 0.25}


class ParameterOnGpu(torch.nn.Parameter):
    """A parameter in host memory that names GPU 3 as its device."""

    is_cuda = True

    def get_device(self):
        """The GPU that `model.to(device)` chose."""
        return 3


class Model(torch.nn.Module):
    """Records, in its forward pass, the GPUs that are limited by then."""

    def __init__(self, limited):
        super().__init__()
        self.weight = ParameterOnGpu(torch.ones(2))
        self.limited = limited
        self.limited_gpus = []

    def forward(self, batch):
        self.limited_gpus.append(list(self.limited))
        return batch * 2


@pytest.fixture
def watched_run():
    """Install the model hook for a run with this limit; the hooks are removed afterwards."""
    hooks = []
    yield lambda limit: hooks.append(ModelHooks(SimpleNamespace(memory_limit=limit)))
    hooks[0].remove()


def global_forward_hooks():
    return len(torch.nn.modules.module._global_forward_pre_hooks)


def test_gpu_is_limited_before_the_first_forward_pass_not_after_the_first_step(limited, watched_run):
    limit = MemoryLimit([20 * GIB], "cuda")
    limit.impose(rank=0)
    model, transform, before = Model(limited), torch.nn.Sequential(torch.nn.ReLU()), global_forward_hooks()
    watched_run(limit)
    assert list(limited) == [2]
    for _ in range(2):
        model(transform(torch.ones(2)))
    assert model.limited_gpus == [[2, 3], [2, 3]]
    assert global_forward_hooks() == before, "a hook would slow down every module's call"


@pytest.mark.parametrize("limit", [MemoryLimit([], "cuda"), MemoryLimit([GIB], "cpu")])
def test_run_without_a_limit_of_gpus_hooks_no_forward_pass(limit, watched_run):
    before = global_forward_hooks()
    watched_run(limit)
    assert global_forward_hooks() == before


def test_run_without_a_limit_limits_no_gpu(limited):
    limit = MemoryLimit([], "cuda")
    limit.impose(rank=0)
    limit.limit_gpu_of(parameter_on(3))
    assert limited == {}

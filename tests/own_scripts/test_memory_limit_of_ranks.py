"""The memory limit of a script's rank on GPUs, with stand-ins for the calls of torch that reach the driver."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from trainfast_runner.door.trainfast_door.memory_limit import MemoryLimit

GIB = 1 << 30


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """The fractions that were set, by GPU; there are four of 80 GiB, and the script has chosen the third."""
    fractions: dict[int, float] = {}
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(total_memory=80 * GIB))
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda fraction, index: fractions.update({index: fraction})
    )
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    return fractions


def parameter_on(gpu: int) -> SimpleNamespace:
    """A parameter on a GPU, as far as the limit looks at it."""
    return SimpleNamespace(is_cuda=True, get_device=lambda: gpu)


def test_rank_that_the_script_started_is_limited_on_the_gpu_it_chose(limited: dict[int, float]) -> None:
    MemoryLimit([20 * GIB], "cuda").impose(rank=0)
    assert limited == {2: 0.25}


def test_rank_of_a_launcher_is_limited_on_its_own_gpu(
    limited: dict[int, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    MemoryLimit([20 * GIB, 40 * GIB], "cuda").impose(rank=1)
    assert limited == {1: 0.5}


def test_gpu_that_the_script_chose_after_its_first_parameter_is_limited_too(limited: dict[int, float]) -> None:
    limit = MemoryLimit([20 * GIB], "cuda")
    limit.impose(rank=0)
    limit.limit_gpu_of(parameter_on(3))
    assert limited == {2: 0.25, 3: 0.25}


def test_run_without_a_limit_limits_no_gpu(limited: dict[int, float]) -> None:
    limit = MemoryLimit([], "cuda")
    limit.impose(rank=0)
    limit.limit_gpu_of(parameter_on(3))
    assert limited == {}

"""The memory limit of a script's rank on GPUs, with stand-ins for the calls of torch that reach the driver."""

import json
from types import SimpleNamespace

import pytest
import torch

from trainfast_runner.door.trainfast_door.memory_limit import MemoryLimit
from trainfast_runner.door.trainfast_door.script_run import ScriptRun

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
    MemoryLimit(20 * GIB, "cuda").impose()
    assert limited == {2: 0.25}


def test_rank_of_a_launcher_has_its_own_limit_on_its_own_gpu(limited, monkeypatch, tmp_path):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    asked = {"script": {"trial": True}, "memory_limit_bytes": [20 * GIB, 40 * GIB], "device": "cuda"}
    (tmp_path / "run.json").write_text(json.dumps(asked))
    ScriptRun(str(tmp_path)).memory_limit.impose()
    assert limited == {1: 0.5}


def test_gpu_that_the_script_chose_after_its_first_parameter_is_limited_too(limited):
    limit = MemoryLimit(20 * GIB, "cuda")
    limit.impose()
    limit.limit_gpu_of(parameter_on(3))
    assert limited == {2: 0.25, 3: 0.25}


def test_run_without_a_limit_limits_no_gpu(limited):
    limit = MemoryLimit(0, "cuda")
    limit.impose()
    limit.limit_gpu_of(parameter_on(3))
    assert limited == {}

"""The probes of a warm process, what their memory counts, and the orders that it waits for."""

import fcntl
import json
import os
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from worker_knobs import worker_knobs

from trainfast_runner.worker import warm
from trainfast_runner.worker.memory import memory_meter
from trainfast_runner.worker.memory.allocator import Allocator
from trainfast_runner.worker.memory.memory_meter import CudaMemoryMeter, HostMemoryMeter
from trainfast_runner.worker.records.step_log import HostClock, StepRecorder
from trainfast_runner.worker.shared import process
from trainfast_runner.worker.shared.words import MEMORY_PHASES
from trainfast_runner.worker.strategies.base import Strategy
from trainfast_runner.worker.warm import MAX_SKIPPED_STEPS, ProbeRunner, orders


def test_the_peak_counts_what_the_limit_counts_and_only_new_peaks(monkeypatch):
    figures = {"VmPeak": 1000, "VmSize": 900, "VmData": 500}
    monkeypatch.setattr(process, "status_bytes", lambda: dict(figures))
    peak = process.AddressSpacePeak()
    # What was let go of before the limit was set hides the first growth.
    assert peak.read() is None
    figures.update(VmPeak=1600, VmSize=1200, VmData=700)
    # 700 more address space at the highest, of which 100 are files that were mapped since.
    assert peak.read() == 600


def test_the_limit_is_added_to_the_memory_of_the_imports(monkeypatch):
    limits = []
    monkeypatch.setattr(process.resource, "setrlimit", lambda which, both: limits.append(both))
    monkeypatch.setattr(process.resource, "getrlimit", lambda which: (-1, -1))
    monkeypatch.setattr(memory_meter.os, "pwrite", lambda *to: 0)  # peaks of this very process are not reset
    figures = {"VmHWM": 700, "VmRSS": 500, "VmData": 400, "RssFile": 0}
    monkeypatch.setattr(HostMemoryMeter, "_read_status", lambda self: dict(figures))
    counters = HostMemoryMeter(1000, Allocator({}))
    counters.start(None)
    counters.end_phase("forward_backward")
    counters.end_phase("optimizer")
    assert counters.end_step_fields()["phase_peaks"] == {"forward_backward": 200, "optimizer": 200}
    assert limits == [(1400, -1)]


@pytest.mark.parametrize(
    ("phase", "step", "with_peaks"),
    [
        ("forward", 1, {"forward_backward"}),
        ("optimizer", 1, {"forward_backward", "optimizer"}),
        ("backward", 2, {"forward_backward", "optimizer"}),
    ],
)
def test_an_oom_is_recorded_with_peaks_of_the_phases_it_reached(phase, step, with_peaks):
    written = {}
    log = SimpleNamespace(phase=phase, step=step, rank=0, write=lambda kind, **fields: written.update(fields))
    memory = SimpleNamespace(
        limit_bytes=None,
        available_bytes=lambda: None,
        free_reserve=lambda: None,
        end_phase=lambda name: None,
        end_step_fields=lambda: {"phase_peaks": dict.fromkeys(MEMORY_PHASES, 7), "peak_allocated_bytes": 7},
    )
    error = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")
    state = SimpleNamespace(strategy=SimpleNamespace(devices=[torch.device("cpu")]))
    prober(state=state, log=log, memory=memory).record_if_oom(error, {"number": 1})
    assert (written["outcome"], set(written["phase_peaks"])) == ("oom", with_peaks)


def prober(**parts):
    """A prober of which only these parts are there."""
    return ProbeRunner(**{**dict.fromkeys(("state", "samples", "memory", "log")), **parts})


def test_memory_reserved_by_an_earlier_size_does_not_count(monkeypatch):
    """The allocator of a GPU, whose counters alone are played: blocks it keeps count until its cache is emptied."""
    kept = {"current": 900, "peak": 900}

    def stats(_device):
        return {"allocated_bytes": {"all": {"peak": 90}}, "reserved_bytes": {"all": dict(kept)}, "num_alloc_retries": 0}

    for name, played in {
        "memory_stats_as_nested_dict": stats,
        "reset_peak_memory_stats": lambda _device: kept.update(peak=kept["current"]),
        "empty_cache": lambda: kept.update(current=100),
        "synchronize": lambda _device: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, played)
    gpu = torch.device("cuda", 0)
    memory = CudaMemoryMeter([gpu], None)
    state = SimpleNamespace(strategy=SimpleNamespace(device=gpu))
    prober(state=state, memory=memory, log=SimpleNamespace()).forget_last_probe()
    for phase in MEMORY_PHASES:
        memory.end_phase(phase)
    assert memory.end_step_fields()["peak_reserved_bytes"] == 100


def probe_in_fp16(gradient):
    """A probe of two steps whose gradients are this large: a real scaler, a real optimizer, a model of one weight."""
    knobs = worker_knobs(precision="fp16")
    strategy = Strategy(knobs, torch.device("cpu"))
    strategy.module = nn.Linear(1, 1, bias=False)
    strategy.optimizer = torch.optim.AdamW(strategy.module.parameters())

    def train(knobs, _batches, recorder):
        for step in range(1, knobs.steps + 1):
            recorder.begin_step(step)
            loss = strategy.module(torch.ones(1)).sum() * gradient
            strategy.backward(loss)
            strategy.optimizer_step()
            recorder.end_step(loss, None, None, 0.0)

    def recorder(write, log, memory, timing_warmup):
        return StepRecorder(write, log, memory, HostClock(), 8, 8, timing_warmup)

    memory, log = SimpleNamespace(end_step_fields=dict), SimpleNamespace(step=0)
    engine = SimpleNamespace(train=train)
    state = SimpleNamespace(knobs=knobs, strategy=strategy, engine=engine, recorder=recorder)
    return strategy, prober(state=state, memory=memory, log=log).take_steps(8, 2, is_first=True)


@pytest.mark.parametrize(("gradient", "skipped"), [(1.0, 0), (1e34, 1), (4e34, 3)])
def test_a_probe_in_fp16_goes_on_until_steps_have_updated_the_weights(gradient, skipped):
    strategy, records = probe_in_fp16(gradient)
    assert strategy.precision.skipped_steps() == skipped
    assert len(records) == 2 + skipped
    assert strategy.optimizer.state, "the states that the probe is to measure"


def test_a_probe_in_fp16_that_only_overflows_fits_nothing():
    with pytest.raises(RuntimeError, match=f"batch_size=8: fp16 overflowed in all {2 + MAX_SKIPPED_STEPS} steps: no"):
        probe_in_fp16(float("inf"))


@pytest.fixture
def search_lock(tmp_path):
    path = tmp_path / "search.lock"
    path.touch()
    return path


def held(path):
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    fcntl.flock(fd, fcntl.LOCK_EX)
    return fd


def order(control, **fields):
    with control.open("a") as file:
        file.write(json.dumps(fields) + "\n")


def test_line_n_is_order_n_and_the_last_line_ends_it(tmp_path, search_lock):
    control = tmp_path / "control.jsonl"
    fd = held(search_lock)
    for batch_size in (4, 8):
        order(control, do="probe", batch_size=batch_size, steps=2)
    order(control, do="end")
    assert [order["batch_size"] for order in orders(control, search_lock)] == [4, 8]
    assert next(orders(control, search_lock))["batch_size"] == 4
    os.close(fd)


def test_without_a_parent_every_rank_takes_what_was_ordered_and_then_ends(tmp_path, search_lock, monkeypatch):
    monkeypatch.setattr(warm, "PARENT_CHECK_S", 0.0)
    control = tmp_path / "control.jsonl"
    order(control, do="probe", batch_size=4, steps=2)
    with control.open("a") as file:
        file.write('{"do":"probe","batch_si')
    for lock in (search_lock, tmp_path / "gone"):
        assert [order["batch_size"] for order in orders(control, lock)] == [4]

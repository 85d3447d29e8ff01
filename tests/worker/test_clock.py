"""The clock of a GPU whose own clock runs fast or slow: only CUDA's events and the host's time are played."""

import itertools
from dataclasses import dataclass

import pytest
import torch

from trainfast_runner.worker.records import step_log
from trainfast_runner.worker.records.step_log import CudaClock

MS = 1_000_000
DAY_NS = 24 * 3600 * 1000 * MS


@dataclass
class Gpu:
    """A queue of work, in the host's nanoseconds; its events measure with a clock that is `ppm` too fast."""

    ppm: float
    now_ns: int = 0
    busy_until_ns: int = 0

    def work(self, duration_ns):
        self.busy_until_ns = max(self.busy_until_ns, self.now_ns) + duration_ns

    def event(self, enable_timing):
        return Event(self)


class Event:
    def __init__(self, gpu):
        self.gpu = gpu
        self.done_ns = 0

    def record(self):
        self.done_ns = max(self.gpu.busy_until_ns, self.gpu.now_ns)

    def query(self):
        return self.gpu.now_ns >= self.done_ns

    def synchronize(self):
        if not self.query():
            self.gpu.now_ns = self.done_ns + MS // 50

    def elapsed_time(self, end):
        return (end.done_ns - self.done_ns) * (1 + self.gpu.ppm / 1e6) / MS


def a_day(monkeypatch, ppm, host_ms, gpu_ms):
    """Steps of a day, each `host_ms` of launching and `gpu_ms` of work: queued, ended, and what the clock says."""
    gpu = Gpu(ppm)
    monkeypatch.setattr(torch.cuda, "Event", gpu.event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(step_log.time, "monotonic_ns", lambda: gpu.now_ns)
    ticking, found = CudaClock(), []
    before = None
    while gpu.now_ns < DAY_NS:
        ticking.enter("forward")
        gpu.now_ns += host_ms * MS
        gpu.work(gpu_ms * MS)
        queued_ns = gpu.now_ns
        times = ticking.end_step()
        ended_ns = max(gpu.busy_until_ns, queued_ns)
        if before is not None:
            found.append((before[0], before[1], *before[2]()))
        before = (queued_ns, ended_ns, times)
    return found


@pytest.mark.parametrize("ppm", [-50, 50])
def test_the_ends_of_a_days_steps_stay_on_the_hosts_clock(monkeypatch, ppm):
    steps = a_day(monkeypatch, ppm, host_ms=1000, gpu_ms=10_000)
    assert len(steps) > 8000
    assert max(abs(told_ns - ended_ns) for _, ended_ns, told_ns, _ in steps) < 2 * MS
    step_ms = 10_000 * (1 + ppm / 1e6)
    assert all(fields["step_ms"] == pytest.approx(step_ms, abs=1e-6) for *_, fields in steps[1:])


@pytest.mark.parametrize("ppm", [-50, 50])
def test_a_step_that_nobody_waited_for_ended_between_being_queued_and_being_found(monkeypatch, ppm):
    """The device is idle most of the time, and has always ended a step before the host asks."""
    steps = a_day(monkeypatch, ppm, host_ms=10_000, gpu_ms=1000)
    assert all(queued_ns <= told_ns <= queued_ns + 10_000 * MS for queued_ns, _, told_ns, _ in steps)
    assert all(one[2] <= other[2] for one, other in itertools.pairwise(steps))

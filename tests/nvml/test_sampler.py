"""The sampling thread: its schedule, its budget, and its end."""

import os
import threading
import time
from contextlib import contextmanager

import msgspec
import pytest
import stand_in
from stand_in import Machine, gpus

from trainfast_runner.machine.telemetry.sampler import Sampler, next_due_s
from trainfast_runner.records.tick import Tick


class Collected:
    """Ticks as they come, and a wait for the n-th."""

    def __init__(self):
        self.ticks = []
        self._arrived = threading.Condition()

    def __call__(self, tick):
        with self._arrived:
            self.ticks.append(tick)
            self._arrived.notify_all()

    def wait_for(self, count, timeout_s=60):
        with self._arrived:
            assert self._arrived.wait_for(lambda: len(self.ticks) >= count, timeout_s), f"{len(self.ticks)} ticks"
            return self.ticks[:count]


@contextmanager
def sampling(machine, period_s):
    """The sampler of this machine after its first tick, and its ticks; it stops at the end."""
    with stand_in.installed(machine):
        collected = Collected()
        sampler = Sampler(collected, period_s=period_s)
        sampler.start()
        collected.wait_for(1)
        yield sampler, collected
        assert sampler.stop(timeout_s=60)


def test_no_tick_comes_early():
    with sampling(Machine(gpus(1)), 0.05) as (_, collected):
        first, *_, last = collected.wait_for(7)
    assert (last.t_ns - first.t_ns) / 1e9 >= 0.25
    assert last.host.cpu_percent is not None


@pytest.mark.parametrize(("late_s", "periods"), [(100, 1), (3.5 * 3600, 4)])
def test_what_a_tick_takes_does_not_shift_the_next_and_a_late_one_is_not_made_up_for(late_s, periods):
    due_s = time.monotonic() - late_s
    assert next_due_s(due_s, 3600.0) == due_s + periods * 3600


def test_a_tick_is_one_json_line_that_reads_back_the_same():
    with sampling(Machine(gpus(2, processes={1: 5})), 0.05) as (_, collected):
        tick = collected.wait_for(2)[1]
    line = msgspec.json.encode(tick)
    assert b"\n" not in line
    assert msgspec.json.decode(line, type=Tick) == tick


def test_stop_does_not_wait_for_the_period_and_takes_a_last_tick():
    with sampling(Machine(gpus(1)), 60) as (sampler, _):
        assert sampler.stop(timeout_s=60), "its thread ends long before another tick is due"
    with sampling(Machine(gpus(1)), 3600) as (sampler, collected):
        assert sampler.stop(timeout_s=60, last_tick=True)
        assert [len(tick.devices) for tick in collected.ticks] == [1, 1]


def test_the_run_can_be_named_and_dropped_while_sampling():
    with sampling(Machine([]), 0.02) as (sampler, collected):
        sampler.set_root_pid(os.getpid())
        seen = len(collected.ticks)
        with_run = collected.wait_for(seen + 3)[-1]
        sampler.set_root_pid(None)
        seen = len(collected.ticks)
        without = collected.wait_for(seen + 3)[-1]
    assert with_run.host.run.processes >= 1
    assert (with_run.host.run.memory_rss_bytes or 0) > 0
    assert without.host.run is None


def test_a_callback_that_fails_ends_the_sampling_and_is_kept(monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda _arguments: None)

    def full_disk(_tick):
        raise OSError("no space left on device")

    with stand_in.installed(Machine([])):
        sampler = Sampler(full_disk, period_s=0.02)
        sampler.start()
        deadline = time.monotonic() + 60
        while sampler.failure is None and time.monotonic() < deadline:
            threading.Event().wait(0.01)
        assert sampler.stop(timeout_s=60)
    assert isinstance(sampler.failure, OSError)

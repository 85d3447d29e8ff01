"""The sampling thread: its schedule, its budget, and its end."""

import os
import threading
import time
from contextlib import contextmanager

import msgspec
import pytest
import stand_in
from stand_in import Machine, gpus

from trainfast_runner.machine.telemetry import sampler as sampler_module
from trainfast_runner.machine.telemetry.sampler import Cadence, Sampler
from trainfast_runner.records.tick import HostReading, Tick


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


def test_no_tick_comes_early(monkeypatch):
    monkeypatch.setattr(sampler_module, "BUDGET_SHARE", 10)
    with sampling(Machine(gpus(1)), 0.05) as (_, collected):
        first, *_, last = collected.wait_for(7)
    assert (last.t_ns - first.t_ns) / 1e9 >= 0.25
    assert last.host.cpu_percent is not None


@pytest.mark.parametrize(("late_s", "periods"), [(100, 1), (3.5 * 3600, 4)])
def test_what_a_tick_takes_does_not_shift_the_next_and_a_late_one_is_not_made_up_for(late_s, periods):
    due_s = time.monotonic() - late_s
    assert Cadence(3600.0).next_due_s(due_s) == due_s + periods * 3600


def test_a_tick_is_one_json_line_that_reads_back_the_same():
    with sampling(Machine(gpus(2, processes={1: 5})), 0.05) as (_, collected):
        tick = collected.wait_for(2)[1]
    line = msgspec.json.encode(tick)
    assert b"\n" not in line
    assert msgspec.json.decode(line, type=Tick) == tick


def test_stop_does_not_wait_for_the_period():
    with sampling(Machine(gpus(1)), 60) as (sampler, _):
        assert sampler.stop(timeout_s=60), "its thread ends long before another tick is due"


def test_a_last_tick_is_taken_on_the_way_out():
    """Nothing would tell of what happened since the tick before it, up to a period ago."""
    with sampling(Machine(gpus(1)), 3600) as (sampler, collected):
        assert sampler.stop(timeout_s=60, last_tick=True)
        assert [len(tick.devices) for tick in collected.ticks] == [1, 1]


def test_the_run_can_be_named_and_dropped_while_sampling(monkeypatch):
    monkeypatch.setattr(sampler_module, "BUDGET_SHARE", 10)
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


def test_expensive_ticks_slow_the_sampling_down_and_it_says_so():
    with sampling(Machine(gpus(1, slow_s=0.03)), 0.1) as (sampler, collected):
        slowed = collected.wait_for(4)[-1]
    assert sampler.period_s > 0.1
    assert slowed.sample_us >= 30_000
    assert slowed.nvml_us <= slowed.sample_us
    assert "instead of every 0.1 s" in slowed.missing["sampler.period"]


def test_the_period_doubles_over_budget_up_to_ten_seconds_and_comes_back_when_ticks_are_cheap():
    cadence = Cadence(1.0)

    def after(milliseconds, times):
        for _ in range(times):
            tick = Tick(t_ns=0, host=HostReading(), devices=[], missing={}, sample_us=round(milliseconds * 1000))
            cadence.adapt_to(tick)
        return tick

    assert after(300, 2).missing == {}, "one slow tick is not yet the machine"
    text = after(300, 1).missing["sampler.period"]
    assert text == "a tick costs 300 ms: sampling every 2 s instead of every 1 s"
    assert (after(300, 20).missing != {}, cadence.period_s) == (True, 2.0), "within the budget of the longer period"
    after(9000, 30)
    assert cadence.period_s == 10.0
    after(1, 60)
    assert cadence.period_s == 1.0
    assert after(1, 1).missing == {}
    cadence.set_period(0.5)
    assert cadence.period_s == 0.5


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


def test_another_period_can_be_asked_for_while_it_runs():
    with sampling(Machine(gpus(1)), 0.02) as (sampler, _):
        sampler.ask_period(60.0)
        assert sampler.period_s == 60.0
        with pytest.raises(ValueError, match="period_s is 0"):
            sampler.ask_period(0)

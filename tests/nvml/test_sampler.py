"""The sampling thread: its schedule, its budget, and its end."""

import os
import statistics
import threading
import time

import msgspec
import stand_in
from stand_in import Machine, gpus

from trainfast_runner.telemetry import Sampler, Tick


class Collected:
    """Ticks as they come, and a wait for the n-th."""

    def __init__(self) -> None:
        self.ticks: list[Tick] = []
        self._arrived = threading.Condition()

    def __call__(self, tick: Tick) -> None:
        with self._arrived:
            self.ticks.append(tick)
            self._arrived.notify_all()

    def wait_for(self, count: int, timeout_s: float = 20) -> list[Tick]:
        with self._arrived:
            assert self._arrived.wait_for(lambda: len(self.ticks) >= count, timeout_s), f"{len(self.ticks)} ticks"
            return self.ticks[:count]


def test_ticks_keep_the_period_without_drift() -> None:
    # Each tick costs 15 ms: a schedule that waits a period after each tick would be 0.3 s behind after twenty.
    with stand_in.installed(Machine(gpus(1, slow_s=0.015))):
        collected = Collected()
        sampler = Sampler(collected, period_s=0.1, budget=10)
        sampler.start()
        ticks = collected.wait_for(21)
        assert sampler.stop()
    since_first_s = [(tick.t_ns - ticks[0].t_ns) / 1e9 for tick in ticks]
    assert since_first_s[-1] >= 1.95
    off_schedule_s = [abs(passed - round(passed / 0.1) * 0.1) for passed in since_first_s]
    assert statistics.median(off_schedule_s) < 0.015
    assert ticks[-1].host.cpu_percent is not None


def test_a_tick_is_one_json_line_that_reads_back_the_same() -> None:
    with stand_in.installed(Machine(gpus(2, processes={1: 5}))):
        collected = Collected()
        sampler = Sampler(collected, period_s=0.05)
        sampler.start()
        tick = collected.wait_for(2)[1]
        sampler.stop()
    line = msgspec.json.encode(tick)
    assert b"\n" not in line
    assert msgspec.json.decode(line, type=Tick) == tick


def test_stop_does_not_wait_for_the_period() -> None:
    with stand_in.installed(Machine(gpus(1))):
        collected = Collected()
        sampler = Sampler(collected, period_s=60)
        sampler.start()
        collected.wait_for(1)
        before = time.monotonic()
        assert sampler.stop()
        assert time.monotonic() - before < 2


def test_the_run_can_be_named_and_dropped_while_sampling() -> None:
    with stand_in.installed(Machine([])):
        collected = Collected()
        sampler = Sampler(collected, period_s=0.02, budget=10)
        sampler.start()
        collected.wait_for(1)
        sampler.set_root_pid(os.getpid())
        seen = len(collected.ticks)
        with_run = collected.wait_for(seen + 3)[-1]
        sampler.set_root_pid(None)
        seen = len(collected.ticks)
        without = collected.wait_for(seen + 3)[-1]
        sampler.stop()
    assert with_run.host.run is not None
    assert with_run.host.run.processes >= 1
    assert (with_run.host.run.memory_rss_bytes or 0) > 0
    assert without.host.run is None


def test_expensive_ticks_slow_the_sampling_down_and_cheap_ones_bring_it_back() -> None:
    machine = Machine(gpus(1, slow_s=0.03))
    with stand_in.installed(machine):
        collected = Collected()
        sampler = Sampler(collected, period_s=0.1, budget=0.2)
        sampler.start()
        slowed = collected.wait_for(5)[-1]
        assert sampler.period_s > 0.1
        assert "instead of every 0.1 s" in slowed.missing["sampler.period"]
        machine.gpus[0].slow_s = 0.0
        seen = len(collected.ticks)
        collected.wait_for(seen + 24)
        sampler.stop()
    assert slowed.sample_us >= 30_000
    assert sampler.period_s == 0.1


def test_a_callback_that_fails_ends_the_sampling_and_is_kept(monkeypatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _arguments: None)

    def full_disk(_tick: Tick) -> None:
        raise OSError("no space left on device")

    with stand_in.installed(Machine([])):
        sampler = Sampler(full_disk, period_s=0.02)
        sampler.start()
        deadline = time.monotonic() + 10
        while sampler.failure is None and time.monotonic() < deadline:
            threading.Event().wait(0.01)
        assert sampler.stop()
    assert isinstance(sampler.failure, OSError)


def test_another_period_can_be_asked_for_while_it_runs() -> None:
    with stand_in.installed(Machine(gpus(1))):
        collected = Collected()
        sampler = Sampler(collected, period_s=0.02)
        sampler.start()
        collected.wait_for(1)
        sampler.ask_period(60.0)
        assert sampler.period_s == 60.0
        assert sampler.stop()

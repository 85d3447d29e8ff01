"""A driver whose calls take for ever, or for long: whoever does not wait for them is on time."""

import threading
import time

import pytest
import stand_in
from stand_in import Machine, gpus

from trainfast_runner.machine.telemetry import binding
from trainfast_runner.machine.telemetry import nvml as nvml_module
from trainfast_runner.machine.telemetry.nvml import Job, Nvml, run_timed


@pytest.fixture
def gate():
    """The event that a hanging call waits for; set at the end, so that no thread outlives the test."""
    event = threading.Event()
    yield event
    event.set()


SHORT_S = 1.0
"""A timeout that a call which does not hang never reaches, however little of the processor it gets."""


def until(condition):
    """Waits for another thread to get there."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.005)


def test_where_all_calls_hang_the_wait_for_all_of_them_is_little_more_than_for_two(gate, monkeypatch):
    given, ends = [], nvml_module._ends
    monkeypatch.setattr(nvml_module, "_ends", lambda *asked: given.append(asked[-1]) or ends(*asked))
    jobs = [Job(gate.wait) for _ in range(4)]
    run_timed(jobs, 0.4)
    began = [job.began_s or 0.0 for job in jobs]
    assert not any(job.ended for job in jobs)
    assert began[1] - began[0] >= 0.4
    assert given == [0.4, 0.2, 0.1, 0.1]


def test_a_gpu_that_hangs_says_so_rests_and_comes_back_and_the_others_have_every_tick(gate):
    machine = Machine(gpus(4))
    with stand_in.installed(machine):
        nvml = Nvml(timeout_s=60)
        assert [gpu.error for gpu in nvml.sample(0)[0]] == [None] * 4
        machine.gpus[1].hangs = gate
        nvml.timeout_s = SHORT_S
        for second in range(1, 4):
            readings, missing = nvml.sample(second * 10**9)
            assert [gpu.temperature_c for gpu in readings] == [50, None, 50, 50]
            assert missing["gpu1"].startswith("this GPU has not answered for ")
            assert readings[1].error == missing["gpu1"]
        gate.set()
        nvml.timeout_s = 60
        until(lambda: nvml.sample(4 * 10**9)[0][1].temperature_c == 50)
        readings, missing = nvml.sample(5 * 10**9)
        assert [gpu.temperature_c for gpu in readings] == [50] * 4
        assert "gpu1" not in missing
        nvml.close()


def test_a_gpu_that_hangs_at_the_first_look_delays_nobody(gate):
    machine = Machine(gpus(2))
    machine.gpus[0].hangs = gate
    with stand_in.installed(machine):
        nvml = Nvml(timeout_s=SHORT_S, opening_s=3 * SHORT_S)
        for second in range(2):
            readings, missing = nvml.sample(second * 10**9)
            assert [gpu.temperature_c for gpu in readings] == [None, 50]
            assert missing["gpu0"].startswith("this GPU has not answered for ")
        gate.set()
        nvml.timeout_s = 60
        until(lambda: nvml.sample(4 * 10**9)[0][0].temperature_c == 50)
        nvml.close()


def test_a_driver_that_hangs_while_it_opens_does_not_hold_the_sampler(gate, monkeypatch):
    with stand_in.installed(Machine(gpus(1), init_hangs=gate)):
        nvml = Nvml(timeout_s=60, opening_s=0.05)
        readings, missing = nvml.sample(0)
        assert readings == []
        assert missing["nvml"].startswith("NVML has not answered for 1 s: the driver is being opened")
        monkeypatch.setattr(binding, "HANGS_AFTER_S", 0.0)
        assert "does not come back. Look for Xid errors" in nvml.sample(10**9)[1]["nvml"]
        gate.set()
        until(lambda: [gpu.temperature_c for gpu in nvml.sample(2 * 10**9)[0]] == [50])
        assert "nvml" not in nvml.sample(3 * 10**9)[1]
        nvml.close()

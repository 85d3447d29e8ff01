"""Events of a run about its devices, from one tick to the next."""

import os
import subprocess
import sys

import msgspec

from trainfast_runner.machine import device_events as events_module
from trainfast_runner.machine.device_events import DeviceEvents
from trainfast_runner.machine.processes import own_pids, sees_host_pids
from trainfast_runner.records.tick import DeviceProcess, DeviceReading, HostReading, Tick

MIB = 1 << 20


def tick(*devices, second=0, **missing):
    return Tick(t_ns=second * 10**9, host=HostReading(), devices=list(devices), missing=missing, sample_us=1)


def gpu(index=0, pids=None, **fields):
    processes = None if pids is None else [DeviceProcess(pid=pid, memory_used_bytes=300 * MIB) for pid in pids]
    return DeviceReading(index=index, uuid=f"GPU-{index}", processes=processes, **fields)


def kinds_and_details(events):
    return [(event.kind, event.device, event.detail) for event in events]


def test_a_gpu_lost_and_back_is_two_events_and_only_of_this_run():
    events = DeviceEvents(["GPU-1"])
    assert events.since_last(tick(gpu(0), gpu(1))) == []
    lost = events.since_last(tick(gpu(0, error="gone"), gpu(1, error="gone"), second=1))
    assert kinds_and_details(lost) == [("gpu_lost", 1, "gone")]
    assert events.since_last(tick(gpu(0, error="gone"), gpu(1, error="gone"), second=2)) == []
    assert kinds_and_details(events.since_last(tick(gpu(0), gpu(1), second=3))) == [("gpu_back", 1, None)]
    assert (events.concerns(1), events.concerns(0)) == (True, False)


def test_throttling_begins_and_ends_by_reason_and_idle_is_none():
    events = DeviceEvents(["GPU-0"])
    assert events.since_last(tick(gpu(throttle_reasons=["idle"]))) == []
    assert kinds_and_details(events.since_last(tick(gpu(throttle_reasons=["sw_thermal", "0x200"])))) == [
        ("throttle_on", 0, "0x200"),
        ("throttle_on", 0, "sw_thermal"),
    ]
    assert events.since_last(tick(gpu(throttle_reasons=None))) == [], "a reading that vanished is no change"
    assert kinds_and_details(events.since_last(tick(gpu(throttle_reasons=["0x200"])))) == [
        ("throttle_off", 0, "sw_thermal")
    ]


def processes_are(monkeypatch, own, *, host_pids):
    """Let the training have these processes, and the driver list ids as they are here, or not."""
    monkeypatch.setattr(events_module, "own_pids", lambda: own)
    monkeypatch.setattr(events_module, "sees_host_pids", lambda: host_pids)


def test_another_process_comes_and_goes_and_the_training_is_not_one(monkeypatch):
    processes_are(monkeypatch, {11, 12}, host_pids=True)
    events = DeviceEvents(["GPU-0"])
    first = events.since_last(tick(gpu(pids=(99_999_999,))))
    assert [(event.pid, event.state) for event in first] == [(99_999_999, "appeared")]
    assert first[0].detail == "a process (pid 99999999) with 300 MiB appeared"
    assert events.since_last(tick(gpu(pids=(99_999_999, 11)))) == [], "the training itself"
    assert events.since_last(tick(gpu(pids=None))) == []
    second = events.since_last(tick(gpu(pids=(11, 12, 99_999_998))))
    assert [(event.pid, event.state) for event in second] == [(99_999_998, "appeared"), (99_999_999, "left")]
    assert [(e.kind, e.pid, e.state) for e in events.since_last(tick(gpu(pids=())))] == [
        ("foreign_process", 99_999_998, "left")
    ]


def test_in_a_container_only_who_was_there_before_the_training_is_foreign(monkeypatch):
    processes_are(monkeypatch, set(), host_pids=False)
    events = DeviceEvents(["GPU-0"])
    (there,) = events.since_last(tick(gpu(pids=(4242,))))
    assert there.detail == "process 4242 of the host with 300 MiB appeared"
    assert events.since_last(tick(gpu(pids=(4242, 5000)))) == [], "it may be the training's own"
    (left,) = events.since_last(tick(gpu(pids=(5000,))))
    assert (left.pid, left.state) == (4242, "left")


def test_where_the_training_is_on_the_cpu_everybody_on_the_gpu_is_somebody_else(monkeypatch):
    processes_are(monkeypatch, {11}, host_pids=False)
    events = DeviceEvents(["GPU-0"], all_foreign=True)
    assert events.since_last(tick(gpu(pids=()))) == []
    assert [event.pid for event in events.since_last(tick(gpu(pids=(11, 5000))))] == [11, 5000]


def test_this_process_is_its_own(tmp_path):
    assert os.getpid() in own_pids()
    outside, inside = tmp_path / "outside", tmp_path / "inside"
    outside.symlink_to("pid:[4026531836]")
    inside.symlink_to("pid:[4026532447]")
    assert (sees_host_pids(outside), sees_host_pids(inside), sees_host_pids(tmp_path / "none")) == (True, False, False)


def test_a_foreign_process_is_named_as_it_calls_itself(tmp_path, monkeypatch):
    processes_are(monkeypatch, set(), host_pids=True)
    nasty = "\x1b[31m[b]x[/]"
    script = f"open('/proc/self/comm', 'w').write({nasty!r}); print(flush=True); input()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", script], **pipes) as other:
        other.stdout.readline()
        events = DeviceEvents(["GPU-0"])
        [event] = events.since_last(tick(gpu(pids=(other.pid,))))
        other.kill()
    # The record has it as it is; whoever shows it takes the control sequences out and reads no markup.
    assert event.detail == f"{nasty} (pid {other.pid}) with 300 MiB appeared"
    line = msgspec.json.encode(event)
    assert b"\x1b" not in line

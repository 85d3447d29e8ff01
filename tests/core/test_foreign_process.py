"""Processes as a person sees them before training, and ending one of them."""

import os
import signal
import subprocess
import sys

import pytest

from on_disk import put
from trainfast_runner.errors import UserError
from trainfast_runner.machine import processes as listing
from trainfast_runner.machine.processes import Identity, ProcessList, check_endable, end_process, identify, is_running
from trainfast_runner.records.home import Home
from trainfast_runner.records.run_directory import shared_lock
from trainfast_runner.records.tick import DeviceProcess, DeviceReading
from trainfast_runner.running.present_state import run_of_process

MARK = "a name (with ) brackets"


@pytest.fixture
def other():
    """A process of one's own that waits for its input to end."""
    process = subprocess.Popen([sys.executable, "-c", "input()", MARK], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def a_gpu(index, *pids):
    return DeviceReading(index=index, processes=[DeviceProcess(pid=pid, memory_used_bytes=2**30) for pid in pids])


def process_list(monkeypatch, *, host_pids):
    """A list where the driver gives process ids as they are here, or not."""
    monkeypatch.setattr(listing, "sees_host_pids", lambda: host_pids)
    return ProcessList()


def row_of(rows, pid):
    (row,) = [row for row in rows if row.pid == pid]
    return row


def test_a_process_on_gpus_has_owner_command_age_and_memory(other, monkeypatch):
    processes = process_list(monkeypatch, host_pids=True)
    row = row_of(processes.read([a_gpu(0, other.pid), a_gpu(2, other.pid)]), other.pid)
    assert (row.devices, row.device_memory_bytes) == (((0, 2**30), (2, 2**30)), 2 * 2**30)
    assert row.is_own
    assert row.command.endswith(f"input() {MARK}")
    assert row.memory_rss_bytes
    assert 0 <= row.age_s < 600
    assert row.cpu_percent is None, "a rate needs two looks"
    assert row.identity == identify(other.pid)


def test_what_keeps_the_host_busy_is_listed_without_a_gpu():
    ballast = bytearray(40 << 20)
    rows = ProcessList().read([])
    assert row_of(rows, os.getpid()).memory_rss_bytes is not None
    assert all(row.devices == () for row in rows)
    assert len(ballast) > 0


def test_the_ids_of_another_namespace_are_not_taken_for_ours(other, monkeypatch):
    rows = process_list(monkeypatch, host_pids=False).read([a_gpu(0, other.pid)])
    row = row_of(rows, other.pid)
    assert (row.identity, row.owner, row.command) == (None, None, "")


def test_a_process_of_the_host_does_not_hide_one_here_with_its_id(monkeypatch):
    ballast = bytearray(40 << 20)
    rows = process_list(monkeypatch, host_pids=False).read([a_gpu(0, os.getpid())])
    ours, theirs = sorted((row for row in rows if row.pid == os.getpid()), key=lambda row: len(row.devices))
    assert (ours.identity, ours.devices) == (identify(os.getpid()), ())
    assert (theirs.identity, theirs.devices) == (None, ((0, 2**30),))
    assert len(ballast) > 0


def test_a_process_that_has_gone_is_listed_as_the_driver_has_it(monkeypatch):
    row = row_of(process_list(monkeypatch, host_pids=True).read([a_gpu(1, 2**22 + 5)]), 2**22 + 5)
    assert (row.identity, row.devices) == (None, ((1, 2**30),))


def test_one_of_ones_own_is_ended(other):
    identity = identify(other.pid)
    assert end_process(identity) == f"SIGTERM sent to process {other.pid}."
    assert other.wait(60) == -signal.SIGTERM
    assert not is_running(identity)
    with pytest.raises(UserError, match="has ended already"):
        end_process(identity)


def test_what_ignores_sigterm_gets_sigkill():
    stubborn = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", stubborn], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        identity = identify(process.pid)
        end_process(identity)
        assert is_running(identity)
        end_process(identity, kill=True)
        assert process.wait(60) == -signal.SIGKILL


def test_a_later_process_with_the_pid_is_left_alone(other):
    identity = identify(other.pid)
    with pytest.raises(UserError, match="belongs to another process by now"):
        end_process(Identity(other.pid, identity.start_ticks - 1))
    assert other.poll() is None


def test_neither_this_program_nor_another_users_process_is_ended(monkeypatch):
    own, first = identify(os.getpid()), identify(1)
    with pytest.raises(UserError, match="this is trainfast-tui itself"):
        check_endable(own)
    with pytest.raises(UserError, match="process 1"):
        check_endable(first)


def test_somebody_elses_process_is_refused_by_name(other, monkeypatch):
    identity = identify(other.pid)
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000)
    with pytest.raises(UserError, match="not to you: ask them"):
        end_process(identity)
    assert other.poll() is None


def test_a_driver_that_lists_thousands_costs_one_look_and_the_largest_are_shown(monkeypatch):
    looks = []
    real = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: looks.append(path) or real(path))
    absurd = [
        DeviceReading(
            index=gpu,
            processes=[DeviceProcess(pid=5_000_000 + 256 * gpu + at, memory_used_bytes=at) for at in range(256)],
        )
        for gpu in range(8)
    ]
    processes = process_list(monkeypatch, host_pids=True)
    for _ in range(5):
        rows = processes.read(absurd)
    assert len(looks) == 1, "none of them can be seen from here, and looking again does not change it"
    assert len(rows) == 200
    assert min(row.device_memory_bytes or 0 for row in rows) == 256 - 200 // 8


def test_the_place_of_a_process_in_a_live_run(tmp_path, other):
    home = Home(tmp_path / "home").create()
    _, directory = home.new_run("tiny")
    events = []
    own, child, stranger = identify(os.getpid()), identify(other.pid), identify(os.getppid())
    run = {"run_id": directory.name, "preset": "tiny", "knobs": {}, "clock": {"monotonic_ns": 0, "wall_ns": 0}}
    put(directory / "run.json", run)

    def place(process):
        lines = [{"t_ns": 0, "kind": kind, "pid": one.pid, "start_ticks": one.start_ticks} for kind, one in events]
        put(directory / "events.jsonl", *lines)
        found = run_of_process(home, process)
        return None if found is None else found.part

    events.append(("supervisor", own))
    assert place(own) is None, "nothing of a run that nobody keeps alive is left"
    with shared_lock(directory):
        assert place(own) == "its supervisor"
        assert place(child) == "one of its processes"
        assert place(stranger) is None
        events[:] = [("launched", child)]
        assert place(child) == "its training process"
        assert place(own) is None

"""Processes as a person sees them before training."""

import os
import subprocess
import sys

import pytest

from trainfast_runner.machine import processes as listing
from trainfast_runner.machine.processes import ProcessList, identify
from trainfast_runner.records.tick import DeviceProcess, DeviceReading

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


def test_a_process_on_gpus_has_owner_command_age_and_memory_and_a_busy_one_is_listed_without(other, monkeypatch):
    processes = process_list(monkeypatch, host_pids=True)
    row = row_of(processes.read([a_gpu(0, other.pid), a_gpu(2, other.pid)]), other.pid)
    assert (row.devices, row.device_memory_bytes) == (((0, 2**30), (2, 2**30)), 2 * 2**30)
    assert row.is_own
    assert row.command.endswith(f"input() {MARK}")
    assert row.memory_rss_bytes
    assert 0 <= row.age_s < 600
    assert row.cpu_percent is None, "a rate needs two looks"
    assert row.identity == identify(other.pid)
    ballast = bytearray(40 << 20)
    rows = ProcessList().read([])
    assert row_of(rows, os.getpid()).memory_rss_bytes is not None
    assert all(row.devices == () for row in rows)
    assert len(ballast) > 0


def test_the_ids_of_another_namespace_are_not_taken_for_ours_and_hide_none_here(other, monkeypatch):
    rows = process_list(monkeypatch, host_pids=False).read([a_gpu(0, other.pid)])
    row = row_of(rows, other.pid)
    assert (row.identity, row.owner, row.command) == (None, None, "")
    ballast = bytearray(40 << 20)
    rows = process_list(monkeypatch, host_pids=False).read([a_gpu(0, os.getpid())])
    ours, theirs = sorted((row for row in rows if row.pid == os.getpid()), key=lambda row: len(row.devices))
    assert (ours.identity, ours.devices) == (identify(os.getpid()), ())
    assert (theirs.identity, theirs.devices) == (None, ((0, 2**30),))
    assert len(ballast) > 0
    row = row_of(process_list(monkeypatch, host_pids=True).read([a_gpu(1, 2**22 + 5)]), 2**22 + 5)
    assert (row.identity, row.devices) == (None, ((1, 2**30),))


def test_a_driver_that_lists_thousands_costs_one_look_and_the_largest_are_shown(monkeypatch):
    looks = []
    real = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: looks.append(path) or real(path))
    many = [DeviceProcess(pid=5_000_000 + at, memory_used_bytes=at % 256) for at in range(8 * 256)]
    absurd = [DeviceReading(index=gpu, processes=many[256 * gpu : 256 * (gpu + 1)]) for gpu in range(8)]
    processes = process_list(monkeypatch, host_pids=True)
    for _ in range(5):
        rows = processes.read(absurd)
    assert len(looks) == 1, "none of them can be seen from here, and looking again does not change it"
    assert len(rows) == 200
    assert min(row.device_memory_bytes or 0 for row in rows) == 256 - 200 // 8

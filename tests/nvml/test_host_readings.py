"""Readings of this machine and of real processes on it."""

import os
import signal
import subprocess
import sys
import time
from collections import namedtuple
from dataclasses import replace

import psutil
import pytest

from cli.command import until
from trainfast_runner.machine.processes import read_stat
from trainfast_runner.machine.telemetry import host
from trainfast_runner.machine.telemetry.host import HostReader, ProcessTree
from trainfast_runner.machine.telemetry.sampler import take_tick

BUSY = "import sys; print('up', flush=True)\nwhile True: pass"
PARENT = """
import subprocess, sys
busy = "import os; parent = os.getppid(); print('up', flush=True)\\nwhile os.getppid() == parent: pass"
child = subprocess.Popen([sys.executable, "-c", busy], stdout=subprocess.PIPE)
child.stdout.readline()
block = bytearray(64 * 1024**2)
print(child.pid, flush=True)
sys.stdin.readline()
child.kill()
child.wait()
print("alone", flush=True)
sys.stdin.readline()
"""


def test_the_machine_is_read_for_real():
    began_ns = time.monotonic_ns()
    tick = take_tick(settle_s=0.1)
    host = tick.host
    assert host.cpu_count == os.cpu_count()
    assert 0 <= host.cpu_percent <= 100
    assert 0 < host.memory_used_bytes < host.memory_total_bytes
    assert 0 < host.memory_available_bytes <= host.memory_total_bytes
    assert host.load_1m is not None
    assert host.run is None
    assert began_ns <= tick.t_ns <= time.monotonic_ns()
    assert 0 < tick.sample_us * 1000 <= time.monotonic_ns() - began_ns


def test_the_first_reading_has_no_rate_and_what_is_null_has_the_same_reason_in_each_tick(monkeypatch):
    reading, missing = HostReader().read()
    assert reading.cpu_percent is None
    assert "two readings" in missing["host.cpu_percent"]
    tick = take_tick(settle_s=0.05)
    for name in ("temperature_c", "disk_read_bytes", "network_received_bytes"):
        assert getattr(tick.host, name) is not None or f"host.{name}" in tick.missing
    monkeypatch.setattr(psutil, "sensors_temperatures", dict)
    reader = HostReader()
    reasons = [reader.read()[1]["host.temperature_c"] for _ in range(2)]
    assert reasons == ["no processor temperature sensor is visible"] * 2


@pytest.mark.parametrize(
    ("before", "now", "percent"),
    [((100, 100), (130, 170), 30.0), ((9, 9), (9, 9), 0.0), ((100, 100), (110, 99), 100.0)],
)
def test_the_percent_is_of_the_time_between_two_readings(monkeypatch, before, now, percent):
    reader = HostReader()
    for seconds in (before, now):
        monkeypatch.setattr(host, "_busy_and_idle_s", lambda seconds=seconds: seconds)
        reading, _ = reader.read()
    assert reading.cpu_percent == percent


Counted = namedtuple("Counted", ["bytes_recv", "bytes_sent", "read_bytes", "write_bytes"], defaults=(0, 0))


def test_network_interfaces_but_loopback_and_whole_disks_are_summed(monkeypatch, tmp_path):
    counters = {"lo": Counted(999, 999)}
    monkeypatch.setattr(psutil, "net_io_counters", lambda pernic, nowrap: counters)
    reading, missing = HostReader().read()
    assert reading.network_received_bytes is None
    assert missing["host.network_received_bytes"] == "no network interface but loopback"
    counters |= {"eth0.12": Counted(5_000_000_000, 40), "ib0": Counted(1, 2)}
    reading, _ = HostReader().read()
    assert (reading.network_received_bytes, reading.network_sent_bytes) == (5_000_000_001, 42)
    monkeypatch.setattr(host, "BLOCK_DEVICES", str(tmp_path))
    for folder in ("sda/device", "cciss!c0d0/device", "dm-0", "loop0"):
        (tmp_path / folder).mkdir(parents=True)
    read_by_name = {"sda": 4, "sda1": 8, "cciss/c0d0": 12, "dm-0": 4, "loop0": 4}
    counters = {name: Counted(0, 0, read, 1) for name, read in read_by_name.items()}
    monkeypatch.setattr(psutil, "disk_io_counters", lambda perdisk, nowrap: counters)
    assert host.read_disks(host.whole_disks()) == {"disk_read_bytes": 16, "disk_write_bytes": 2}


@pytest.mark.parametrize(
    ("function", "key"),
    [
        ("disk_io_counters", "host.disk_read_bytes"),
        ("cpu_times", "host.cpu_percent"),
        ("virtual_memory", "host.memory_used_bytes"),
        ("net_io_counters", "host.network_received_bytes"),
    ],
)
def test_a_figure_that_the_system_refuses_has_a_reason(monkeypatch, function, key):
    def refuse(**_options):
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(psutil, function, refuse)
    reading, missing = HostReader().read()
    assert getattr(reading, key.removeprefix("host.")) is None
    assert missing[key].startswith("the system does not give this reading: ")
    assert reading.load_1m is not None


@pytest.fixture
def parent():
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    yield process
    process.kill()
    process.communicate()


def test_a_process_tree_is_summed_and_follows_its_children(parent, monkeypatch):
    monkeypatch.setattr(host, "SEARCH_EVERY", 1)
    child = psutil.Process(int(parent.stdout.readline()))
    tree = ProcessTree(parent.pid)
    first = tree.read()
    assert first.cpu_percent is None
    spent_s = child.cpu_times().user
    until(lambda: child.cpu_times().user > spent_s, "a tick of the child on a core")
    both = tree.read()
    assert both.processes == 2
    assert both.threads >= 2
    assert both.cpu_percent > 0, "the child is busy"
    assert both.memory_rss_bytes > 64 * 1024**2
    parent.stdin.write("\n")
    assert parent.stdout.readline() == "alone\n"
    alone = tree.read()
    assert alone.processes == 1
    parent.kill()
    parent.wait()
    with pytest.raises(ProcessLookupError, match="have ended"):
        tree.read()


def test_children_stay_in_the_tree_when_their_parent_dies(parent, monkeypatch):
    monkeypatch.setattr(host, "SEARCH_EVERY", 1)
    child_pid = int(parent.stdout.readline())
    tree = ProcessTree(parent.pid)
    tree.read()
    # On its own it would notice, and end.
    os.kill(child_pid, signal.SIGSTOP)
    parent.kill()
    parent.wait()
    try:
        orphan = tree.read()
        assert orphan.processes == 1
    finally:
        os.kill(child_pid, signal.SIGKILL)


def test_a_tree_uses_what_psutil_says_its_processes_use(parent):
    child = psutil.Process(int(parent.stdout.readline()))
    tree = ProcessTree(parent.pid)
    tree.read()
    ours = tree.read()
    theirs = [psutil.Process(parent.pid), child]
    assert ours.threads == sum(process.num_threads() for process in theirs)
    rss = sum(process.memory_info().rss for process in theirs)
    # The kernel counts pages for each core, and adds them up now and then.
    assert abs(ours.memory_rss_bytes - rss) < 4 * 1024**2


def test_a_child_that_is_born_later_is_found(monkeypatch):
    monkeypatch.setattr(host, "SEARCH_EVERY", 1)
    script = "read line; sleep 100 & echo $!; read line; kill $!"
    with subprocess.Popen(["sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as shell:
        tree = ProcessTree(shell.pid)
        counts = []
        for _ in range(2):
            counts.append(tree.read().processes)
        shell.stdin.write("\n")
        shell.stdin.flush()
        shell.stdout.readline()
        counts.append(tree.read().processes)
        shell.stdin.write("\n")
    assert counts == [1, 1, 2]


def test_a_pid_that_came_to_somebody_else_is_no_member_any_more(parent, monkeypatch):
    parent.stdout.readline()
    tree = ProcessTree(parent.pid)
    both = tree.read()
    assert both.processes == 2

    def later(pid):
        stat = read_stat(pid)
        return stat and replace(stat, start_ticks=stat.start_ticks + 1)

    monkeypatch.setattr(host, "read_stat", later)
    with pytest.raises(ProcessLookupError):
        tree.read()


def test_a_process_that_never_was_reads_as_ended():
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    reader = HostReader()
    reader.tree = ProcessTree(gone.pid)
    reading, missing = reader.read()
    assert reading.run is None
    assert str(gone.pid) in missing["run"]

"""Readings of this machine and of real processes on it."""

import os
import subprocess
import sys
import time

import pytest

from trainfast_runner.telemetry import take_tick
from trainfast_runner.telemetry.host import HostReader
from trainfast_runner.telemetry.process_tree import ProcessTree

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


def test_the_machine_is_read_for_real() -> None:
    tick = take_tick(settle_s=0.1)
    host = tick.host
    assert host.cpu_count == os.cpu_count()
    assert len(host.cpu_percent_per_core or []) == host.cpu_count
    assert host.cpu_percent is not None
    assert 0 <= host.cpu_percent <= 100
    assert 0 < (host.memory_used_bytes or 0) < (host.memory_total_bytes or 0)
    assert 0 < (host.memory_available_bytes or 0) <= (host.memory_total_bytes or 0)
    assert host.load_1m is not None
    assert host.run is None
    assert abs(time.monotonic_ns() - tick.t_ns) < 10_000_000_000
    assert 0 < tick.sample_us < 5_000_000


def test_the_first_reading_has_no_rate_and_says_why() -> None:
    reading, missing = HostReader().read()
    assert reading.cpu_percent is None
    assert reading.cpu_percent_per_core is None
    assert "two readings" in missing["host.cpu_percent"]


def test_what_is_null_has_a_reason() -> None:
    tick = take_tick(settle_s=0.05)
    for name in ("temperature_c", "disk_read_bytes", "network_received_bytes"):
        assert getattr(tick.host, name) is not None or f"host.{name}" in tick.missing


@pytest.fixture
def parent():
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    yield process
    process.kill()
    process.communicate()


def test_a_process_tree_is_summed_and_follows_its_children(parent: subprocess.Popen[str]) -> None:
    assert parent.stdin
    assert parent.stdout
    parent.stdout.readline()
    tree = ProcessTree(parent.pid, search_every=1)
    first = tree.read()
    assert first is not None
    assert first.cpu_percent is None
    started = time.monotonic()
    while time.monotonic() - started < 0.5:
        os.stat("/")
    both = tree.read()
    assert both is not None
    assert both.processes == 2
    assert both.threads >= 2
    # How much a busy child gets is up to whatever else this machine does.
    assert (both.cpu_percent or 0) > 0, "the child is busy"
    assert (both.memory_rss_bytes or 0) > 64 * 1024**2
    parent.stdin.write("\n")
    assert parent.stdout.readline() == "alone\n"
    alone = tree.read()
    assert alone is not None
    assert alone.processes == 1
    if both.read_bytes is not None:
        assert (alone.read_bytes or 0) >= both.read_bytes, "a counter must not fall when a process ends"
    parent.kill()
    parent.wait()
    assert tree.read() is None


def test_children_stay_in_the_tree_when_their_parent_dies(parent: subprocess.Popen[str]) -> None:
    assert parent.stdout
    child_pid = int(parent.stdout.readline())
    tree = ProcessTree(parent.pid, search_every=1)
    tree.read()
    parent.kill()
    parent.wait()
    try:
        orphan = tree.read()
        assert orphan is not None
        assert orphan.processes == 1
    finally:
        os.kill(child_pid, 9)


def test_a_process_that_never_was_reads_as_ended() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    tick = take_tick(gone.pid, settle_s=0.01)
    assert tick.host.run is None
    assert str(gone.pid) in tick.missing["run"]

"""Readings of this machine and of real processes on it."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import psutil
import pytest

from trainfast_runner.machine.processes.tree import ProcessTree
from trainfast_runner.machine.telemetry import kernel_figures, process_stat, run_processes
from trainfast_runner.machine.telemetry.host import HostReader
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


def test_the_machine_is_read_for_real() -> None:
    began_ns = time.monotonic_ns()
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
    assert began_ns <= tick.t_ns <= time.monotonic_ns()
    assert 0 < tick.sample_us * 1000 <= time.monotonic_ns() - began_ns


def test_the_first_reading_has_no_rate_and_says_why() -> None:
    reading, missing = HostReader().read()
    assert reading.cpu_percent is None
    assert reading.cpu_percent_per_core is None
    assert "two readings" in missing["host.cpu_percent"]


def test_what_is_null_has_a_reason() -> None:
    tick = take_tick(settle_s=0.05)
    for name in ("temperature_c", "disk_read_bytes", "network_received_bytes"):
        assert getattr(tick.host, name) is not None or f"host.{name}" in tick.missing


def test_the_kernels_figures_are_those_of_psutil() -> None:
    """Each stands between two of psutil's, which go on meanwhile; of memory, within what others may take and free."""
    disks_before = psutil.disk_io_counters(nowrap=False)
    network_before = psutil.net_io_counters(pernic=True, nowrap=False)
    times_before = psutil.cpu_times(percpu=True)
    memory, disks, network = kernel_figures.memory(), kernel_figures.Disks().flow(), kernel_figures.network()
    times = kernel_figures.core_times()
    times_after = psutil.cpu_times(percpu=True)
    disks_after = psutil.disk_io_counters(nowrap=False)
    network_after = psutil.net_io_counters(pernic=True, nowrap=False)

    theirs = psutil.virtual_memory()
    assert memory.total == theirs.total
    assert abs(memory.available - theirs.available) < theirs.total / 5
    assert memory.swap_used <= psutil.swap_memory().total
    assert (disks is None) == (disks_before is None)
    if disks is not None and disks_before is not None and disks_after is not None:
        assert disks_before.read_bytes <= disks.inward <= disks_after.read_bytes
        assert disks_before.write_bytes <= disks.outward <= disks_after.write_bytes
    outside = [name for name in network_before if name != "lo"]
    assert (network is None) == (not outside)
    if network is not None:
        received = [sum(seen[name].bytes_recv for name in outside) for seen in (network_before, network_after)]
        sent = [sum(seen[name].bytes_sent for name in outside) for seen in (network_before, network_after)]
        assert received[0] <= network.inward <= received[1]
        assert sent[0] <= network.outward <= sent[1]
    per_s = os.sysconf("SC_CLK_TCK")
    assert len(times) == len(times_before)
    for before, ours, after in zip(times_before, times.values(), times_after, strict=True):
        assert round(before.user * per_s) <= ours.busy
        # The kernel may set the waiting time back by a tick or two (proc(5)).
        assert round((before.idle + before.iowait) * per_s) - 2 <= ours.idle
        assert ours.idle <= round((after.idle + after.iowait) * per_s) + 2


def test_a_cores_percent_is_of_its_own_time_and_a_core_switched_on_has_none_yet() -> None:
    def times(busy: int, idle: int) -> kernel_figures.CoreTimes:
        return kernel_figures.CoreTimes(busy, idle)

    before = {b"cpu0": times(100, 100), b"cpu1": times(100, 100), b"cpu3": times(100, 100)}
    now = {b"cpu0": times(130, 170), b"cpu1": times(100, 100), b"cpu2": times(7, 7), b"cpu3": times(110, 99)}
    assert kernel_figures.busy_percent(before, now) == [30.0, 0.0, 100.0]


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """Files of other machines, as their kernels wrote them."""
    found: dict[str, bytes] = {}
    monkeypatch.setattr(kernel_figures, "content", found.__getitem__)
    return found


def test_network_interfaces_other_than_loopback_are_summed(files: dict[str, bytes]) -> None:
    head = (
        b"Inter-|   Receive                            |  Transmit\n face |bytes    packets errs drop fifo frame ...\n"
    )
    loopback = b"    lo: 999 2 0 0 0 0 0 0 999 2 0 0 0 0 0 0\n"
    files["/proc/net/dev"] = head + loopback
    assert kernel_figures.network() is None
    # A long name or figure leaves no blank behind the colon.
    files["/proc/net/dev"] += (
        b"eth0.12:5000000000 7 0 0 0 0 0 3 40 8 0 0 0 0 0 0\n  ib0: 1 1 0 0 0 0 0 0 2 1 0 0 0 0 0 0\n"
    )
    assert kernel_figures.network() == (5_000_000_001, 42)


def test_memory_without_what_is_available_comes_from_psutil(files: dict[str, bytes]) -> None:
    files["/proc/meminfo"] = b"MemTotal:       1000 kB\nMemFree:         100 kB\nSwapTotal:  0 kB\nSwapFree:   0 kB\n"
    files["/proc/stat"] = b"cpu  1 1 1 1 0 0 0 0\ncpu0 1 1 1 1 0 0 0 0\nintr 5\n"
    reading, missing = HostReader().read()
    assert reading.memory_total_bytes == psutil.virtual_memory().total
    assert reading.cpu_count == 1
    assert "/proc/diskstats" in missing["host.disk_read_bytes"], "of what is not there, it is said so"


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
    # On its own it would notice, and end.
    os.kill(child_pid, signal.SIGSTOP)
    parent.kill()
    parent.wait()
    try:
        orphan = tree.read()
        assert orphan is not None
        assert orphan.processes == 1
    finally:
        os.kill(child_pid, signal.SIGKILL)


def test_a_tree_uses_what_psutil_says_its_processes_use(parent: subprocess.Popen[str]) -> None:
    assert parent.stdout
    child = psutil.Process(int(parent.stdout.readline()))
    tree = ProcessTree(parent.pid)
    tree.read()
    ours = tree.read()
    assert ours is not None
    theirs = [psutil.Process(parent.pid), child]
    assert ours.threads == sum(process.num_threads() for process in theirs)
    rss = sum(process.memory_info().rss for process in theirs)
    # The kernel counts pages for each core, and adds them up now and then.
    assert abs((ours.memory_rss_bytes or 0) - rss) < 4 * 1024**2
    assert (ours.read_bytes or 0) <= sum(process.io_counters().read_bytes for process in theirs)


@pytest.mark.parametrize("tells_newest_pid", [True, False])
def test_a_child_that_is_born_later_is_found(tells_newest_pid: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not tells_newest_pid:
        # As a sandbox has it.
        monkeypatch.setattr(run_processes, "content", lambda path: b"0.00 0.00 0.00 0/0 0\n")
    script = "read line; sleep 100 & echo $!; read line; kill $!"
    with subprocess.Popen(["sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as shell:
        assert shell.stdin
        assert shell.stdout
        tree = ProcessTree(shell.pid, search_every=1)
        counts = []
        for _ in range(2):
            reading = tree.read()
            counts.append(reading and reading.processes)
        shell.stdin.write("\n")
        shell.stdin.flush()
        shell.stdout.readline()
        reading = tree.read()
        counts.append(reading and reading.processes)
        shell.stdin.write("\n")
    assert counts == [1, 1, 2]


def test_a_pid_that_came_to_somebody_else_is_no_member_any_more(
    parent: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert parent.stdout
    parent.stdout.readline()
    tree = ProcessTree(parent.pid)
    both = tree.read()
    assert both is not None
    assert both.processes == 2

    def later(pid: int) -> process_stat.Stat | None:
        stat = process_stat.read_stat(pid)
        return stat and replace(stat, start_ticks=stat.start_ticks + 1)

    monkeypatch.setattr(run_processes, "read_stat", later)
    assert tree.read() is None


def test_a_process_that_never_was_reads_as_ended() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    tick = take_tick(gone.pid, settle_s=0.01)
    assert tick.host.run is None
    assert str(gone.pid) in tick.missing["run"]

"""How threads wait is chosen at launch by what others take of the cores; the user's own settings stand."""

import os
import signal
import subprocess
import sys
from contextlib import contextmanager

import psutil
import pytest

from cli.command import until
from trainfast_runner.machine import cpu
from trainfast_runner.machine.cpu import CpuWindow, _busy_s, fixed_policy, policy_beside, thread_count, thread_variables
from trainfast_runner.worker.shared.host import wait_policy

TICKS_S = 0.1
"""The kernel counts in hundredths of a second, of each process and core."""


@contextmanager
def endless(command):
    """The pid of a process that never sleeps."""
    pid = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)


def spent_s(process):
    times = process.cpu_times()
    return times.user + times.system


def others_s(window):
    """At least and at most the seconds that others took by a window, whose age grows while it is read."""
    least_age_s = window.age_s
    others = window.others_cores()
    return others * least_age_s, others * window.age_s


def use_a_core(process):
    """Wait until a process has used a core for a while; returns its CPU seconds meanwhile."""
    began_s = spent_s(process)
    until(lambda: spent_s(process) - began_s >= 0.3, "the process to use a core")
    return spent_s(process) - began_s


def test_a_process_of_somebody_else_counts():
    # Started by a shell that ends at once, it is nobody's child here.
    with endless(["sh", "-c", f"{sys.executable} -c 'while True: pass' >/dev/null 2>&1 & echo $!"]) as pid:
        window = CpuWindow()
        taken_s = use_a_core(psutil.Process(pid))
        _, most_s = others_s(window)
    assert most_s >= taken_s - TICKS_S


def test_a_child_of_ours_does_not_count():
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        began_s, window = _busy_s(), CpuWindow()
        taken_s = use_a_core(psutil.Process(child.pid))
        least_s, _ = others_s(window)
        busy_s = _busy_s() - began_s
    finally:
        child.kill()
        child.wait()
    assert least_s <= busy_s - taken_s + TICKS_S


def test_a_child_that_ended_does_not_count():
    began_s, window = _busy_s(), CpuWindow()
    subprocess.run([sys.executable, "-c", "import time\nwhile time.process_time() < 0.5: pass"], check=True)
    least_s, _ = others_s(window)
    assert least_s <= _busy_s() - began_s - 0.5 + TICKS_S


def test_a_look_in_which_a_child_lost_its_parent_tells_nothing():
    spin = "import time; print(flush=True)\nwhile time.process_time() < 0.5: pass\nprint(flush=True); time.sleep(600)"
    shell = subprocess.Popen(
        ["sh", "-c", f"{sys.executable} -c '{spin}' & echo $!; wait"], stdout=subprocess.PIPE, text=True
    )
    pid = int(shell.stdout.readline())
    try:
        for _ in range(2):
            shell.stdout.readline()
        window = CpuWindow()
        shell.kill()
        shell.wait()
        assert window.others_cores() is None
    finally:
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(("value", "count"), [("4", 4), ("2,4", 2), *((text, None) for text in ("all", "²", "", None))])
def test_a_number_of_threads_that_libgomp_ignores_is_none(value, count):
    assert thread_count({} if value is None else {"OMP_NUM_THREADS": value}) == count


def test_idle_cores_let_threads_spin_busy_ones_sleep_and_a_script_has_its_environment():
    idle, busy = policy_beside(0.01), policy_beside(1.0)
    assert (idle.wait, idle.env) == ("default", {})
    assert (busy.wait, busy.env) == ("passive", {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"})
    assert "other processes used 100 % of a core" in busy.reason
    assert policy_beside(None).wait == "passive"
    kept = [policy_beside(*one).wait for one in ((0.1, "default"), (0.03, "passive"), (0.2, "default"))]
    assert kept == ["default", "passive", "passive"], "little load does not make a standby's policy void"
    assert fixed_policy({}, threads=1).wait == "unused", "one thread a rank needs no policy"
    assert fixed_policy({}, threads=None) is None
    environments = [({}, 1), ({"OMP_WAIT_POLICY": "PASSIVE"}, 1), ({"OMP_NUM_THREADS": "1"}, 1), ({}, 2)]
    policies = [cpu.script_policy(*one) for one in environments]
    assert [policy and policy.wait for policy in policies] == ["default", "passive", "unused", None]


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"])
def test_the_users_own_setting_is_kept_and_named(name):
    policy = fixed_policy({name: "7"}, threads=2)
    assert policy.env == {}
    assert name in policy.reason


@pytest.mark.parametrize("other", ["GOMP_SPINCOUNT=infinite", "KMP_LIBRARY=turnaround", "KMP_BLOCKTIME=200"])
def test_a_passive_policy_beside_a_setting_that_spins_is_named_with_it(other):
    name, _, value = other.partition("=")
    assert wait_policy({"OMP_WAIT_POLICY": "passive", name: value}) == f"OMP_WAIT_POLICY=passive, {other}"


@pytest.mark.parametrize(
    ("device", "strategy", "cores", "ranks", "threads"),
    [
        ("cuda", "zero2-offload", 16, 4, "4"),
        ("cuda", "zero3-offload", 2, 8, "1"),
        ("cuda", "ddp", 16, 4, None),
        ("cpu", "single", 16, 1, None),
        ("cpu", "ddp", 16, 4, "4"),
    ],
)
def test_ranks_that_compute_on_the_cpu_share_its_cores(device, strategy, cores, ranks, threads):
    expected = {"OMP_NUM_THREADS": threads} if threads else {}
    assert thread_variables(device, strategy, cores, ranks, {}) == expected
    assert thread_variables(device, strategy, cores, ranks, {"OMP_NUM_THREADS": "2"}) == {}

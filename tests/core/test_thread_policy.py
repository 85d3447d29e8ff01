"""How threads wait is chosen at launch by what others take of the cores; the user's own settings stand."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from trainfast_runner.hardware.others_cpu import CpuWindow
from trainfast_runner.hardware.thread_policy import (
    IDLE_CORES,
    kept_policy,
    policy_beside,
    shared_cores,
)


def test_a_process_of_somebody_else_is_seen() -> None:
    # Started by a shell that ends at once, it is nobody's child here.
    endless = f"{sys.executable} -c 'while True: pass' >/dev/null 2>&1 & echo $!"
    pid = int(subprocess.run(["sh", "-c", endless], capture_output=True, text=True, check=True).stdout)
    try:
        window = CpuWindow()
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and (window.age_s < 0.5 or (window.others_cores() or 0) < 2 * IDLE_CORES):
            os.sched_yield()
        others = window.others_cores()
        assert others is not None
        assert others >= 2 * IDLE_CORES
    finally:
        os.kill(pid, signal.SIGKILL)


def test_idle_cores_let_threads_spin_and_busy_ones_let_them_sleep() -> None:
    idle, busy = policy_beside(0.01), policy_beside(1.0)
    assert (idle.wait, idle.env) == ("default", {})
    assert busy.wait == "passive"
    assert busy.env == {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}
    assert "others took 100 % of a core" in busy.reason
    assert policy_beside(None).wait == "passive"


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"])
def test_the_users_own_setting_is_kept_and_named(name: str) -> None:
    policy = kept_policy({name: "7"}, threads=2)
    assert policy is not None
    assert policy.env == {}
    assert name in policy.reason


def test_one_thread_a_rank_needs_no_policy() -> None:
    policy = kept_policy({}, threads=1)
    assert policy is not None
    assert policy.wait == "unused"
    assert kept_policy({}, threads=0) is None


def test_zero_offload_on_several_gpus_shares_the_cores_between_ranks() -> None:
    assert shared_cores("cuda", "zero2-offload", 16, 4, {}) == {"OMP_NUM_THREADS": "4"}
    assert shared_cores("cuda", "zero3-offload", 2, 8, {}) == {"OMP_NUM_THREADS": "1"}
    assert shared_cores("cuda", "ddp", 16, 4, {}) == {}
    assert shared_cores("cuda", "zero2-offload", 16, 4, {"OMP_NUM_THREADS": "2"}) == {}


def test_a_process_alone_on_the_cpu_has_the_threads_of_the_users_own_script() -> None:
    assert shared_cores("cpu", "single", 16, 1, {}) == {}
    assert shared_cores("cpu", "ddp", 16, 4, {}) == {"OMP_NUM_THREADS": "4"}

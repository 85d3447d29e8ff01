"""A standby: a fresh process with its imports done, which becomes a run as a cold one begins, or leaves nothing."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace

import psutil
import pytest

from cli.command import SMALL, until
from trainfast_runner.machine import warm_python
from trainfast_runner.machine.warm_python import WARM
from trainfast_runner.memory.tracing import trace_model
from trainfast_runner.records.home import Home
from trainfast_runner.records.json_lines import read_all
from trainfast_runner.records.run_directory import read_result
from trainfast_runner.records.run_lines import Step
from trainfast_runner.running import launch
from trainfast_runner.running.planning import plan_run
from trainfast_runner.running.settling import request_stop
from trainfast_runner.settings.spec import resolve

pytestmark = [pytest.mark.long, pytest.mark.ci, pytest.mark.xdist_group("standby")]

TINY = [*SMALL[1::2], "devices=cpu", "steps=6"]
HUNG = "the standby's supervisor did not answer"
NO_DEVICE = """
import json, os, sys
sys.argv = ["-c"]
sys.path.insert(0, {folder!r})
import bootstrap
from trainfast_worker import standby
standby._import_for_run("cuda", {{"family": "llama"}}, "causal-lm")
import torch
late = [name for name in ("deepspeed", "bitsandbytes") if name in sys.modules]
print(json.dumps([torch.cuda.is_initialized(), len(os.listdir("/proc/self/task")), late]))
"""
KEEPER = """
import sys, time
from pathlib import Path
from trainfast_runner.records.home import Home
from trainfast_runner.running import launch
from trainfast_runner.running.planning import plan_run
from trainfast_runner.settings.spec import resolve
plan, home = plan_run(resolve("tiny-llama", sys.argv[2:])), Home(Path(sys.argv[1]))
launch.keep_standby(plan, home)
sys.stdin.readline()
print(launch.start(plan, home), flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def home(tmp_path, cache, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setenv("TRAINFAST_HOME", str(tmp_path / "home"))
    yield Home(tmp_path / "home")
    WARM.close()


def plan(*settings):
    return plan_run(resolve("tiny-llama", [*TINY, *settings]))


def waiting(pid=None):
    """The waiting training processes below that process."""
    found = []
    for one in psutil.Process(pid or os.getpid()).children(recursive=True):
        with suppress(psutil.Error):  # it has ended meanwhile
            words = one.cmdline()
            found += [one] * ("standby" in words and any(word.endswith("bootstrap.py") for word in words))
    return found


def kept(plan, home):
    """Keep a standby and return its processes, once they have done their imports."""
    launch.keep_standby(plan, home)
    found = until(lambda: len(waiting()) == max(1, plan.world_size) + (plan.world_size > 1) and waiting(), "a standby")
    until(lambda: all(one.status() == "sleeping" for one in found), "its imports")
    return found


def result_of(directory):
    return until(lambda: read_result(directory), "the result")


def test_a_run_from_a_standby_is_the_run_that_a_cold_process_makes(home, tmp_path, monkeypatch):
    """The standby has answered a question by a fork, and the run has a folder and a variable of its own."""
    cold = result_of(launch.start(plan(), home))
    [process] = kept(plan("seed=7"), home)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert trace_model(resolve("tiny-llama", ["model.num_hidden_layers=2"])).parameters > 0
    assert process.is_running()
    run = plan()
    directory = launch.start(replace(run, cwd=str(tmp_path), env={**run.env, "NCCL_P2P_DISABLE": "1"}), home)
    pid = until(lambda: read_all(directory / "events.jsonl", dict)[0][-1].get("pid"), "the process")
    until(lambda: os.readlink(f"/proc/{pid}/fd/0") == os.devnull, "the standby's turn")  # its pid is told before it
    assert os.readlink(f"/proc/{pid}/cwd") == str(tmp_path)
    warm = result_of(directory)
    assert (cold.start.kind, warm.start.kind, warm.start.reason) == ("cold", "standby", None)
    assert list(warm.start.seconds) == ["plan", "process", "imports", "data", "model", "first_step"]
    assert sum(warm.start.seconds.values()) < sum(cold.start.seconds.values())
    assert (warm.state, warm.loss) == ("finished", cold.loss)
    assert warm.memory.peak_allocated_bytes == pytest.approx(cold.memory.peak_allocated_bytes, abs=4 << 20)
    until(lambda: not waiting(), "its end")


def test_ranks_under_torchrun_wait_and_go_together(home):
    settings = ("strategy=ddp", "devices=2")
    assert len(kept(plan(*settings), home)) == 3
    result = result_of(launch.start(plan(*settings), home))
    assert (result.state, result.start.kind, result.actual.world_size) == ("finished", "standby", 2)


def test_a_standby_starts_no_device_and_no_thread():
    folder = str(warm_python.BOOTSTRAP.parent)
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "4"}
    answer = subprocess.check_output([sys.executable, "-c", NO_DEVICE.format(folder=folder)], env=environment)
    assert json.loads(answer) == [False, 1, []]


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        pytest.param(lambda one: (one.kill(), until(lambda: not waiting(), "its end")), "the standby died", id="died"),
        pytest.param(lambda one: one.suspend(), "the standby did not answer", id="hangs"),
        pytest.param(lambda one: one.parent().suspend(), HUNG, id="its supervisor hangs"),
    ],
)
def test_a_spoilt_standby_means_a_cold_start_that_says_why(home, spoil, reason):
    [process] = kept(plan(), home)
    spoil(process)
    result = result_of(launch.start(plan(), home))
    assert (result.state, result.start.kind, result.start.reason) == ("finished", "cold", reason)
    assert until(lambda: not process.is_running(), "the standby to be gone")


def test_another_key_means_a_cold_start_that_says_why(home, monkeypatch):
    for settings, reason in (
        (("strategy=ddp", "devices=2"), "the standby is for another device or number of ranks"),
        (("OMP_NUM_THREADS",), "OMP_NUM_THREADS changed"),
    ):
        kept(plan(), home)
        run = plan(*(one for one in settings if "=" in one))
        if run.world_size == 1:
            run = replace(run, env={**run.env, settings[0]: "1"})
        result = result_of(launch.start(run, home))
        assert (result.state, result.start.kind, result.start.reason) == ("finished", "cold", reason)
    kept(plan(), home)
    monkeypatch.setattr(warm_python.training_python, "install_stamps", lambda python: ["another package"])
    result = result_of(launch.start(plan(), home))
    assert result.start.reason == "packages of the training Python have changed"


def test_no_standby_without_memory_nor_beside_a_run(home, monkeypatch):
    directory = launch.start(plan("steps=100000"), home)
    launch.keep_standby(plan(), home)
    assert waiting() == []
    request_stop(directory)
    assert result_of(directory).state == "stopped"
    monkeypatch.setattr(warm_python, "read_host_free_bytes", lambda: warm_python.STANDBY_NEEDS_BYTES - 1)
    launch.keep_standby(plan(), home)
    assert waiting() == []


@pytest.mark.parametrize("imports", [True, False], ids=["while it imports", "while it waits"])
@pytest.mark.parametrize("killed", ["keeper", "supervisor", "process"])
def test_nothing_waits_two_seconds_after_a_kill(home, tmp_path, killed, imports):
    keeper = subprocess.Popen([sys.executable, "-c", KEEPER, str(tmp_path / "home"), *TINY], stdin=subprocess.PIPE)
    try:
        [process] = until(lambda: waiting(keeper.pid), "the standby")
        supervisor = process.parent()
        until(lambda: imports or process.status() == "sleeping", "its imports")
        {"keeper": keeper, "supervisor": supervisor, "process": process}[killed].send_signal(signal.SIGKILL)
        time.sleep(2)
        assert [one for one in (process, supervisor) if one.is_running() and one.status() != "zombie"] == []
        assert [*(tmp_path / "home" / "standby").iterdir()] == [] or killed == "supervisor"
    finally:
        keeper.kill()
        keeper.wait()


def test_a_run_that_began_from_a_standby_outlives_its_keeper_and_its_supervisor(home, tmp_path):
    command = [sys.executable, "-c", KEEPER, str(tmp_path / "home"), *TINY, "steps=60"]
    keeper = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    [process] = until(lambda: waiting(keeper.pid), "the standby")
    keeper.stdin.write("\n")
    keeper.stdin.flush()
    directory = home.directory(keeper.stdout.readline().strip().rpartition("/")[2])
    supervisor = process.parent()
    keeper.kill()
    keeper.wait()
    until(lambda: (directory / "steps.jsonl").exists(), "the first step")
    supervisor.kill()
    until(lambda: not process.is_running(), "the end of the training")
    assert len(read_all(directory / "steps.jsonl", Step)[0]) == 60

"""A run whose supervisor died: it goes on, is shown for what it is, can be ended, and is never forgotten."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from cli.command import until
from on_disk import result
from trainfast_runner.errors import UserError
from trainfast_runner.machine.processes import identify
from trainfast_runner.records.run_directory import is_alive, read_result, shared_lock
from trainfast_runner.running.follower import Follower
from trainfast_runner.running.present_state import run_state
from trainfast_runner.running.settling import recover_result, request_stop, stop_unsupervised
from trainfast_runner.worker.shared.host import states_folder


def kill_supervisor(run):
    run.supervisor.kill()
    run.supervisor.wait()


def test_the_training_outlives_its_supervisor_and_is_lost_only_in_name(run):
    run.train("begin(); train(5); wait_for('go'); train(5, first=6); say('finished')")
    kill_supervisor(run)
    now = run_state(run.directory)
    assert (now.state, now.supervised, now.ended) == ("running", False, False)
    assert recover_result(run.directory) is None
    assert request_stop(run.directory) is False
    (run.directory / "go").touch()
    until(lambda: run_state(run.directory).ended, "the run to end")
    assert read_result(run.directory) is None, "a look writes nothing"
    result = recover_result(run.directory)
    assert read_result(run.directory) == result
    assert result.state == "lost"
    assert result.reason == (
        "the supervisor ended before the run did: 10 steps recorded; every rank had recorded that it finished"
    )
    assert (result.steps.measured, result.throughput.samples_per_s.median) == (8, 400)
    assert result.seconds is not None


def test_a_run_without_supervisor_is_ended_by_hand(run):
    """Its launcher obeys, one rank does not, and another process keeps the lock open."""
    run.start(
        """
        def stubborn():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            train(3)
            if os.fork() == 0:  # like a data loader: it inherits the lock
                say("started", pid=os.getpid())
                wait_for_ever()
            wait_for_ever()
        spawn_rank(0, 1, stubborn)
        wait_for_ever()
        """
    )
    until(lambda: len(run.pids()) == 2, "two processes")
    run.child_pid()  # is on record before the one who writes it is gone
    kill_supervisor(run)
    left = []
    result = stop_unsupervised(run.directory, 0.5, left.append)
    assert result.state == "lost"
    assert "3 steps recorded; no end was recorded" in result.reason
    assert left[0] > left[-1] == 0.0
    assert not is_alive(run.directory)
    assert not [pid for pid in [run.child_pid(), *run.pids()] if identify(pid)]
    with pytest.raises(UserError, match="is not running: it is lost"):
        stop_unsupervised(run.directory, 0.5)


def test_forks_of_a_leader_that_died_by_itself_are_ended_by_hand(run):
    """Like data loaders: they are below nobody of the run any more, and their lock keeps it from ending."""
    run.start(
        """
        begin(); train(3)
        if os.fork() == 0:
            say("forked", pid=os.getpid()); wait_for_ever()
        wait_for_ever()
        """
    )
    (fork,) = until(lambda: run.worker("forked"), "the fork")
    run.in_training()
    kill_supervisor(run)
    os.kill(run.child_pid(), signal.SIGKILL)
    until(lambda: identify(run.child_pid()) is None, "the leader to end")
    assert is_alive(run.directory)
    result = stop_unsupervised(run.directory, 5.0)
    assert result.state == "lost"
    assert identify(fork["pid"]) is None


def test_a_supervised_run_is_not_ended_behind_its_supervisors_back(run):
    run.train("begin(); train(3); wait_for_ever()")
    with pytest.raises(UserError, match="has a supervisor"):
        stop_unsupervised(run.directory, 1.0)


def test_readers_that_come_at_once_agree(run):
    run.train("begin(); train(5); wait_for_ever()")
    kill_supervisor(run)
    os.kill(run.child_pid(), signal.SIGKILL)
    until(lambda: identify(run.child_pid()) is None, "the training to end")
    seen = []

    def read():
        recover_result(run.directory)
        seen.append(run_state(run.directory))

    readers = [threading.Thread(target=read) for _ in range(8)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert len(seen) == 8
    assert {state.state for state in seen} == {"lost"}
    assert not [path for path in run.directory.iterdir() if path.name.startswith(".")]


def test_a_reader_that_comes_before_the_lock_is_free_sees_a_live_run(run):
    run.start("begin(); wait_for_ever()")
    until(lambda: run.worker("started"), "the rank")
    assert recover_result(run.directory) is None
    assert run_state(run.directory).state == "starting"


def test_files_of_a_trial_and_offloaded_states_go_when_no_supervisor_removed_them(run, tmp_path):
    """Beside the states is what the user keeps there: a checkout of this project, called trainfast-tui, was deleted."""
    disk = tmp_path / "disk"
    states = states_folder(disk, run.directory)
    others = [disk / name for name in ("trainfast-tui", "trainfast-offload-of-mine", f"{states.name}-copy")]
    for folder in (*others, states):
        folder.mkdir(parents=True)
        (folder / "mine").touch()
    run.prepare("", knobs={"strategy": "zero3-offload", "offload_path": str(disk)})
    (run.directory / "alive.lock").touch()
    (run.directory / "sandbox").mkdir()
    (run.directory / "sandbox" / "checkpoint").write_bytes(b"x")
    assert recover_result(run.directory) is not None
    assert not (run.directory / "sandbox").exists()
    assert not states.exists()
    assert all((folder / "mine").exists() for folder in others)


def test_nothing_but_an_empty_directory(tmp_path):
    assert run_state(tmp_path).state == "starting"
    os.utime(tmp_path, (0, 0))
    now = run_state(tmp_path)
    assert now.state == "lost"
    assert "run.json is missing" in (now.reason or "")
    assert recover_result(tmp_path) is None


def test_a_home_that_cannot_be_written_still_tells(run, monkeypatch):
    run.prepare("")
    # A directory stands where the temporary file must go: works for root too, whom no permission stops.
    (run.directory / f".result.json.{os.getpid()}-{threading.get_native_id()}").mkdir()
    result = recover_result(run.directory)
    assert result.state == "lost"
    assert read_result(run.directory) is None


def test_a_result_of_a_newer_version_is_never_overwritten(run):
    run.prepare("")
    newer = b'{"schema": 9, "run_id": {"of": "another shape"}, "state": "finished"}\n'
    (run.directory / "result.json").write_bytes(newer)
    assert recover_result(run.directory) is None
    now = run_state(run.directory)
    assert (now.ended, now.reason) == (True, "result.json was written by a newer trainfast-tui: update this one")
    assert (run.directory / "result.json").read_bytes() == newer


def test_a_run_that_was_written_off_is_not_started(run):
    """Its launcher died before the supervisor had the lock, and a reader wrote its result in between."""
    run.prepare("begin(); train(5); say('finished')")
    result = recover_result(run.directory)
    assert result.state == "lost"
    done = subprocess.run(
        [sys.executable, "-P", "-m", "trainfast_runner.running.supervisor", str(run.directory)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "has ended already" in done.stderr
    assert read_result(run.directory) == result


def test_a_run_that_recorded_its_end_is_live_until_its_result_is_written(run):
    """Whoever waits for the last snapshot would otherwise wait for a result that it never shows."""
    run.prepare("")
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    us = {"t_ns": 1, "kind": "supervisor", "pid": os.getpid(), "start_ticks": ticks}
    ended = {"t_ns": 2, "kind": "state", "state": "finished", "reason": "all steps taken"}
    with shared_lock(run.directory):
        (run.directory / "events.jsonl").write_text(f"{json.dumps(us)}\n{json.dumps(ended)}\n")
        follower = Follower(run.directory)
        follower.poll()
        second = follower.poll()
        assert (second.state, second.result) == ("finished", None)
        (run.directory / "result.json").write_bytes(msgspec.json.encode(result(run.directory.name)))
        assert follower.poll().result is not None

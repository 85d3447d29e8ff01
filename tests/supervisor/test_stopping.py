"""Ending a run: the ladder from SIGTERM to SIGKILL, and that nothing survives it."""

import os
import signal
import time
from pathlib import Path

import pytest

from trainfast_runner.errors import UserError
from trainfast_runner.running.present_state import run_state
from trainfast_runner.running.settling import kill_now, request_stop
from trainfast_runner.running.supervisor import SupervisorBounds

from .conftest import process_exists, until

IGNORES_TERM = "signal.signal(signal.SIGTERM, signal.SIG_IGN); begin(); train(3); wait_for_ever()"


def test_stop(run, ended_clean):
    run.train("begin(); train(3); wait_for_ever()")
    assert request_stop(run.directory)
    result = run.end()
    assert (result.state, result.reason) == ("stopped", "stopped as asked, after 3 steps")
    assert [event.state for event in run.events("state")] == ["starting", "running", "stopping", "stopped"]
    ended_clean(run)
    with pytest.raises(UserError, match="is not running: it is stopped"):
        request_stop(run.directory)


def test_stop_that_needs_sigkill(run, ended_clean):
    run.train(IGNORES_TERM, SupervisorBounds(grace_s=1.0))
    assert request_stop(run.directory)
    until(lambda: run_state(run.directory).state == "stopping", "the state stopping")
    now = run_state(run.directory)
    assert now.supervised
    assert now.stop_deadline_ns is not None
    (asked,) = run.events("stop_requested")
    assert asked.t_ns + 10**9 <= now.stop_deadline_ns <= time.monotonic_ns() + 10**9
    for _ in range(3):
        request_stop(run.directory)
    result = run.end()
    assert result.state == "killed"
    assert result.reason == "asked to stop, did not within 1 s and was killed, after 3 steps"
    assert (len(run.events("stop_requested")), len(run.events("kill_sent"))) == (1, 1)
    ended_clean(run)


def test_kill_now(run, ended_clean):
    run.train(IGNORES_TERM)
    run.signal(signal.SIGINT)
    until(lambda: run_state(run.directory).state == "stopping", "the state stopping")
    assert kill_now(run.directory)
    result = run.end()
    assert (result.state, result.reason) == ("killed", "killed as asked, after 3 steps")
    ended_clean(run)


def test_a_run_that_finishes_although_asked_to_stop_has_finished(run):
    run.train(
        "signal.signal(signal.SIGTERM, lambda *_: (say('finished'), os._exit(0))); begin(); train(3); signal.pause()"
    )
    request_stop(run.directory)
    assert run.end().state == "finished"


def test_everything_below_goes_wherever_it_hid(run, ended_clean):
    """Ranks are sessions of their own, and one has let itself be orphaned: SIGKILL to a group misses them all."""
    run.start(
        """
        def stubborn():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0:
                    begin(2, 2)  # an orphan of the second generation
                    wait_for_ever()
                os._exit(0)
            train(3)
            wait_for_ever()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        spawn_rank(0, 2, stubborn); spawn_rank(1, 2, wait_for_ever)
        wait_for_ever()
        """,
        SupervisorBounds(grace_s=0.5),
        world_size=2,
    )
    until(lambda: len(run.pids()) == 3, "three processes to say they started")
    run.in_training()
    request_stop(run.directory)
    assert (run.end().state, len(run.pids())) == ("killed", 3)
    ended_clean(run)


def test_what_a_finished_training_left_behind_is_ended_too(run, ended_clean):
    result = run.result_of(
        """
        def daemon():
            os.mkfifo(f"{RUN_DIR}/ready"); signal.pause()
        begin(); train(3)
        spawn_rank(1, 1, daemon); wait_for("ready")
        say("finished")
        """
    )
    assert result.state == "finished"
    assert len(run.pids()) == 2
    ended_clean(run)


def test_forks_of_a_leader_that_died_by_itself_are_ended_too(run, ended_clean):
    """One is in its session and one is not; both ignore SIGTERM."""
    run.start(
        """
        begin(); train(3)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        for number in range(2):
            if os.fork() == 0:
                if number:
                    os.setsid()
                say("started", pid=os.getpid()); wait_for_ever()
        wait_for_ever()
        """,
        SupervisorBounds(grace_s=0.5),
    )
    until(lambda: len(run.pids()) == 3, "two forks")
    run.in_training()
    os.kill(run.child_pid(), signal.SIGSEGV)
    assert run.end().state == "killed"
    ended_clean(run)


def test_hangup_does_not_touch_the_run(run):
    run.train("begin(); train(3); wait_for('go'); train(3, first=4); say('finished')")
    run.signal(signal.SIGHUP)
    (run.directory / "go").touch()
    result = run.end()
    assert (result.state, result.steps.measured) == ("finished", 4)
    # Only the supervisor lets it pass by: the training has its own way with signals.
    assert not process_exists(run.child_pid())


def test_signals_are_not_left_ignored_in_the_training(run):
    result = run.result_of(
        """
        asked_for = (signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1)
        print([s.name for s in asked_for if signal.getsignal(s) == signal.SIG_IGN]); begin(); train(3); say("finished")
        """
    )
    assert result.state == "finished"
    assert (run.directory / "output.log").read_text() == "[]\n"


def test_stop_does_not_signal_a_stranger_with_the_supervisors_pid(run, tmp_path):
    """After a reboot, or once a pid went round, the number in the records belongs to somebody else: here to us."""
    run.prepare("", boot_id="another boot of this machine")
    ticks = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    line = f'{{"t_ns": 1, "kind": "supervisor", "pid": {os.getpid()}, "start_ticks": {ticks}}}\n'
    (run.directory / "events.jsonl").write_text(line)
    with pytest.raises(UserError, match="lost"):
        request_stop(run.directory)
    run.prepare("")
    (run.directory / "events.jsonl").write_text(line.replace(ticks, str(int(ticks) - 1)))
    with pytest.raises(UserError, match="lost"):
        kill_now(run.directory)

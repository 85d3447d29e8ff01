"""A bug in the analysis of a run costs its figures: the verdict is there before, and the run is listed."""

import os
import shutil
import signal

from cli.command import until
from on_disk import put
from trainfast_runner.records import run_directory
from trainfast_runner.records.file_locks import is_alive
from trainfast_runner.records.home import Home
from trainfast_runner.records.result import Result, StepCount
from trainfast_runner.records.run_directory import is_unfinished, read_result, read_written_result
from trainfast_runner.results import summary
from trainfast_runner.running.follower import Follower
from trainfast_runner.running.history import iter_rows
from trainfast_runner.running.present_state import run_state
from trainfast_runner.running.recovery import recover_result

from .conftest import Run

TRAINING = "begin(); train(5); say('finished')"
FAILURE = "the figures of this run could not be computed: ZeroDivisionError: of a test (sitecustomize.py, line 6)"


def with_a_bug(tmp_path, what):
    """The environment of a supervisor whose analysis does `what` where it computes the throughput."""
    (tmp_path / "sitecustomize.py").write_text(
        f"import os, signal, sys, time\ntry:\n    from trainfast_runner.results import summary\n"
        f"    right = summary._throughput\n    def wrong(*of):\n        {what}\n        return right(*of)\n"
        "    summary._throughput = wrong\nexcept ImportError:\n    pass\n"
    )
    return {**os.environ, "PYTHONPATH": str(tmp_path)}


def test_a_bug_in_the_analysis_leaves_state_and_reason(run, tmp_path):
    run.prepare(TRAINING)
    run.supervise(env=with_a_bug(tmp_path, "raise ZeroDivisionError('of a test')"))
    result = run.end()
    assert (result.state, result.reason) == ("finished", "took all 5 steps")
    assert (result.preset, result.provisional) == ("stand-in", False)
    assert (result.throughput.samples_per_s.median, result.troubles) == (None, [FAILURE])


def test_a_bug_in_reading_the_records_leaves_state_and_reason(run, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "try:\n    from trainfast_runner.records import run_records\n"
        "    def wrong(*of):\n        raise ZeroDivisionError('of a test')\n"
        "    run_records._read_steps = wrong\nexcept ImportError:\n    pass\n"
    )
    run.prepare(TRAINING)
    run.supervise(env={**os.environ, "PYTHONPATH": str(tmp_path)})
    result = run.end()
    assert (result.state, result.reason, result.provisional) == ("finished", "finished without a recorded step", False)
    assert result.troubles[0].startswith("the records of this run could not be read: ZeroDivisionError: of a test")


def test_the_verdict_is_on_the_disk_before_the_analysis(run, tmp_path):
    """Nobody takes it for the whole result while the supervisor is at work on that."""
    run.prepare(TRAINING)
    wait = f"\n        while not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.01)"
    run.supervise(env=with_a_bug(tmp_path, wait))
    written = until(lambda: read_written_result(run.directory), "the verdict")
    assert (written.state, written.reason, written.provisional) == ("finished", "took all 5 steps", True)
    assert read_result(run.directory) is None
    assert recover_result(run.directory) is None
    assert run_state(run.directory).state == "finished"
    assert is_unfinished(run.directory), "another launch waits until the analysis is done"
    (tmp_path / "go").touch()
    assert run.end().throughput.samples_per_s.median == 400
    assert not is_unfinished(run.directory)


def test_a_run_that_ends_between_two_looks_at_its_provisional_result_gives_the_whole_one(tmp_path, monkeypatch):
    """A batch search took the figures that were missing for a script without a measured step."""
    provisional = Result(run_id="r", state="finished", provisional=True)
    put(tmp_path / "result.json", provisional)

    def ends_now(directory):
        put(directory / "result.json", Result(run_id="r", state="finished", steps=StepCount(measured=2)))
        return False

    monkeypatch.setattr(run_directory, "is_alive", ends_now)
    assert read_result(tmp_path).steps.measured == 2


def test_a_supervisor_killed_in_its_analysis_has_given_its_verdict(run, tmp_path):
    """Whoever looks next completes the result: a launch, the list of runs, or a follower."""
    run.prepare(TRAINING)
    run.supervise(env=with_a_bug(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)"))
    assert run.supervisor.wait(60) == -signal.SIGKILL
    until(lambda: not is_alive(run.directory), "the lock to be free")
    assert read_written_result(run.directory).provisional
    assert run_state(run.directory).state == "finished"
    home = Home(tmp_path / "home").create()
    shutil.copytree(run.directory, home.directory(run.directory.name))
    shutil.copytree(run.directory, tmp_path / "followed")

    result = recover_result(run.directory)
    assert (result.state, result.reason) == ("finished", "took all 5 steps")
    assert result.throughput.samples_per_s.median == 400
    assert read_result(run.directory) == result
    (row,) = iter_rows(home)
    assert (row.state, row.reason, row.samples_per_s) == ("finished", "took all 5 steps", 400)
    follower = Follower(tmp_path / "followed")
    last = until(lambda: (one := follower.poll()).result is not None and follower.poll() is one and one, "the end")
    assert (last.state, last.result.throughput.samples_per_s.median) == ("finished", 400)


def test_a_bug_in_the_analysis_of_a_lost_run_does_not_stop_the_list(tmp_path, monkeypatch):
    home = Home(tmp_path)
    for run_id in ("20260101-000000-stand-in-0001", "20260101-000001-stand-in-0002"):
        directory = home.directory(run_id)
        directory.mkdir(parents=True)
        Run(directory).prepare("")
    recover_result(home.directory("20260101-000001-stand-in-0002"))

    def wrong(*_):
        raise ZeroDivisionError("of a test")

    monkeypatch.setattr(summary, "_throughput", wrong)
    assert [row.state for row in iter_rows(home)] == ["lost", "lost"]
    result = read_result(home.directory("20260101-000000-stand-in-0001"))
    assert "0 steps recorded" in result.reason
    assert "ZeroDivisionError: of a test" in result.troubles[0]

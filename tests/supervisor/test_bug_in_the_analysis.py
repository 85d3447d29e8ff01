"""The settling of a run in a process of its own: a bug or a death there costs neither the verdict nor the run."""

import os
import shutil

from cli.command import until
from trainfast_runner.records.home import Home
from trainfast_runner.records.run_directory import is_alive, is_unfinished, read_result
from trainfast_runner.results import summary
from trainfast_runner.running.follower import Follower
from trainfast_runner.running.history import iter_rows
from trainfast_runner.running.present_state import run_state
from trainfast_runner.running.settling import recover_result

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
    assert (result.state, result.reason, result.preset) == ("finished", "took all 5 steps", "stand-in")
    assert (result.throughput.samples_per_s.median, result.troubles) == (None, [FAILURE])


def test_a_bug_in_reading_the_records_leaves_state_and_reason(run, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "try:\n    from trainfast_runner.records import run_directory\n"
        "    def wrong(*of):\n        raise ZeroDivisionError('of a test')\n"
        "    run_directory._read_steps = wrong\nexcept ImportError:\n    pass\n"
    )
    run.prepare(TRAINING)
    run.supervise(env={**os.environ, "PYTHONPATH": str(tmp_path)})
    result = run.end()
    assert (result.state, result.reason) == ("finished", "finished without a recorded step")
    assert result.troubles[0].startswith("the records of this run could not be read: ZeroDivisionError: of a test")


def test_the_verdict_is_told_before_the_analysis(run, tmp_path):
    run.prepare(TRAINING)
    wait = f"\n        while not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.01)"
    run.supervise(env=with_a_bug(tmp_path, wait))
    state = until(lambda: (state := run_state(run.directory)).ended and state, "the verdict")
    assert (state.state, state.reason) == ("finished", "took all 5 steps")
    assert recover_result(run.directory) is None
    assert is_unfinished(run.directory), "another launch waits until the analysis is done"
    (tmp_path / "go").touch()
    assert run.end().throughput.samples_per_s.median == 400
    assert not is_unfinished(run.directory)


def test_run_whose_analysis_dies_is_settled_by_its_next_reader(run, tmp_path):
    """A launch, the list of runs, or a follower, each by the facts that the supervisor recorded."""
    run.prepare(TRAINING)
    run.supervise(env=with_a_bug(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)"))
    assert run.supervisor.wait(60) == 0, "the supervisor is not taken down"
    assert not is_alive(run.directory)
    assert read_result(run.directory) is None
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

"""Who conducts a batch search, and what a conductor takes over, waits for and leaves in the journal."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest
from begun_search import conducted, search

from plans import PLAN
from trainfast_runner.errors import UserError
from trainfast_runner.machine.processes import identify
from trainfast_runner.records.file_locks import shared_lock
from trainfast_runner.records.home import Home
from trainfast_runner.records.result import Result
from trainfast_runner.records.run_file import ClockAnchor, RunFile
from trainfast_runner.records.search_directories import conductor_lock, is_conducted
from trainfast_runner.running import launch
from trainfast_runner.running.planning import RunPlan
from trainfast_runner.search import control
from trainfast_runner.search.batch import conductor, opening
from trainfast_runner.search.batch.batch_follower import BatchFollower
from trainfast_runner.search.batch.batch_plan import BatchPlan
from trainfast_runner.search.batch.conduct import conduct_batch
from trainfast_runner.search.batch.decide import BatchDecision
from trainfast_runner.search.batch.state import BatchState
from trainfast_runner.search.conducting.conductor import SearchCaller
from trainfast_runner.search.control import cancel, conductor_of
from trainfast_runner.search.journal.batch import (
    BatchLaunched,
    BatchQuestion,
    BatchStep,
    ConfirmationRun,
    Predicted,
    read_batch_journal,
)
from trainfast_runner.search.journal.lines import (
    Resumed,
    Waiting,
)
from trainfast_runner.search.memory import limits
from trainfast_runner.search.options import BatchSearchOptions
from trainfast_runner.settings.spec import resolve

MIB = 1 << 20


def test_one_process_conducts_a_search(tmp_path: Path) -> None:
    directory, _ = search(Home(tmp_path))
    assert not is_conducted(directory)
    with conductor_lock(directory) as held:
        assert held
        assert is_conducted(directory)
        with conductor_lock(directory) as again:
            assert not again
    assert not is_conducted(directory)


def test_a_conductor_is_only_signalled_when_it_is_the_very_process(tmp_path: Path) -> None:
    directory, journal = search(Home(tmp_path))
    journal.write(conducted())
    assert conductor_of(directory) is None
    assert not cancel(directory)
    with conductor_lock(directory):
        # This process has the pid on record, but did not start when the record says.
        assert conductor_of(directory) is not None
        assert not cancel(directory)


def test_a_search_that_needs_more_than_is_free_now_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, free = Home(tmp_path), [8 << 30]
    for module in (limits, opening):
        monkeypatch.setattr(module, "read_host_free_bytes", lambda: free[0])
    first = opening.open_batch(BatchPlan(PLAN), home, BatchSearchOptions())
    free[0] -= 512 * MIB
    assert opening.open_batch(BatchPlan(PLAN), home, BatchSearchOptions()) == first, "its limit is 0.9 of what was free"
    free[0] -= 512 * MIB
    second = opening.open_batch(BatchPlan(PLAN), home, BatchSearchOptions())
    assert second != first
    asked = read_batch_journal(second)[0]
    assert isinstance(asked, BatchQuestion)
    assert sum(asked.limits_bytes) <= free[0]


def test_a_search_whose_own_processes_hold_its_memory_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, free = Home(tmp_path), [8 << 30]
    for module in (limits, opening):
        monkeypatch.setattr(module, "read_host_free_bytes", lambda: free[0])
    first = opening.open_batch(BatchPlan(PLAN), home, BatchSearchOptions())
    free[0] = 1 << 30
    with conductor_lock(first):
        assert opening.open_batch(BatchPlan(PLAN), home, BatchSearchOptions()) == first
    assert opening.open_batch(BatchPlan(PLAN), home, BatchSearchOptions()) != first


def a_run(home: Home, directory: Path, *, role: str | None = None, steps: int = 10, state: str = "") -> Path:
    """A confirmation run of the search in `directory`, or with no role a run of somebody else's."""
    _, run_directory = home.new_run("tiny-llama")
    spec = PLAN.spec.with_overrides(batch_size=4, steps=steps, timing_warmup=min(3, steps - 1))
    run = RunFile(
        run_id=run_directory.name,
        **spec.record_fields(),
        device="cpu",
        role=role,
        search_id=None if role is None else directory.name,
        clock=ClockAnchor(monotonic_ns=0, wall_ns=0),
    )
    (run_directory / "run.json").write_bytes(msgspec.json.encode(run))
    if state:
        result = Result(run_id=run_directory.name, state=state, knobs=run.knobs)
        (run_directory / "result.json").write_bytes(msgspec.json.encode(result))
    return run_directory


def confirming(monkeypatch: pytest.MonkeyPatch, started: Callable[[RunPlan, Home, object], Path]) -> None:
    """Let a search confirm 4 until a run has finished with it; `started` takes the place of a launch."""

    def decided(state: BatchState) -> BatchDecision:
        if state.confirmations:
            return BatchDecision(BatchStep(action="end", why="because"), "failed")
        return BatchDecision(BatchStep(action="prove", batch_size=4, why="because"))

    monkeypatch.setattr(conductor, "decide", decided)
    monkeypatch.setattr(launch, "start", started)


@pytest.mark.parametrize("is_launch_recorded", [True, False])
@pytest.mark.parametrize("state", ["finished", "failed"])
def test_a_confirmation_run_that_ended_behind_a_killed_conductor_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, is_launch_recorded: bool
) -> None:
    home = Home(tmp_path).create()
    directory, journal = search(home)
    journal.write(Predicted(reason="nothing is predicted"))
    left = a_run(home, directory, role="proof", state=state)
    a_run(home, directory, role="proof", state="stopped")
    a_run(home, directory, role="proof", steps=50, state="finished")
    if is_launch_recorded:
        journal.write(BatchLaunched(run_id=left.name, role="proof"))

    def started(plan: RunPlan, home: Home, on_wait: object) -> Path:
        raise AssertionError("it is measured a second time")

    confirming(monkeypatch, started)
    conduct_batch(directory, BatchPlan(PLAN), home, BatchSearchOptions(), SearchCaller())
    lines = read_batch_journal(directory)
    assert [line.run_id for line in lines if isinstance(line, ConfirmationRun)] == [left.name]
    assert [line.run_id for line in lines if isinstance(line, BatchLaunched)] == [left.name]


def test_a_search_that_waits_for_another_run_says_so_in_its_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Home(tmp_path).create()
    directory, journal = search(home)
    journal.write(Predicted(reason="nothing is predicted"))
    other = a_run(home, directory)
    monkeypatch.setattr(launch.time, "sleep", lambda seconds: None)

    def started(plan: RunPlan, home: Home, on_wait: object) -> Path:
        return a_run(home, directory, role="proof", state="finished")

    confirming(monkeypatch, started)
    with ExitStack() as held:
        held.enter_context(shared_lock(other))
        looks: list[None] = []

        def is_cancelled() -> bool:
            looks.append(None)
            if len(looks) == 5:
                held.close()
            return False

        conduct_batch(
            directory, BatchPlan(PLAN), home, BatchSearchOptions(wait=True), SearchCaller(is_cancelled=is_cancelled)
        )
    kinds = [type(line) for line in read_batch_journal(directory)]
    assert kinds[3:7] == [BatchStep, Waiting, Resumed, BatchLaunched]
    waiting = next(line for line in read_batch_journal(directory) if isinstance(line, Waiting))
    assert waiting.run_id == other.name


def test_an_error_of_our_own_ends_the_search_in_its_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = Home(tmp_path)
    directory, journal = search(home)
    journal.write(Predicted(reason="nothing is predicted"))

    def broken(state: BatchState) -> BatchDecision:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(conductor, "decide", broken)
    with pytest.raises(ZeroDivisionError):
        conduct_batch(directory, BatchPlan(PLAN), home, BatchSearchOptions(), SearchCaller())
    seen = BatchFollower(directory).poll()
    assert (seen.state, seen.ended.reason if seen.ended else "") == ("failed", "ZeroDivisionError: division by zero")
    assert not seen.is_live


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("raise RuntimeError('the reason')", "the search process ended before it answered: RuntimeError: the reason"),
        ("import signal; signal.pause()", "the search process did not answer within 3 s"),
    ],
)
def test_f13_a_conductor_that_hangs_or_dies_at_birth_ends_the_start_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, words: str
) -> None:
    note_pid = f"import os; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n"
    (tmp_path / "born.py").write_text(note_pid + program)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(control, "CONDUCTOR_MODULE", "born")
    monkeypatch.setattr(control, "ANSWERS_WITHIN_S", 3.0)
    with pytest.raises(UserError, match=words):
        control.start_search(resolve("tiny-llama"), Home(tmp_path))
    pid = int((tmp_path / "pid").read_text())
    deadline_s = time.monotonic() + 60
    while identify(pid) is not None:
        assert time.monotonic() < deadline_s, "the conductor is left"

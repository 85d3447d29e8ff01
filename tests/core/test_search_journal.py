"""A search's journal: the lines that are read of it, the time worked, and how it looks from outside."""

from __future__ import annotations

from pathlib import Path

import pytest
from begun_search import SECOND, asked, conducted, search
from msgspec.structs import replace

from trainfast_runner.errors import UserError
from trainfast_runner.records.home import Home
from trainfast_runner.records.result import Result, StepTime
from trainfast_runner.records.run_file import SCHEMA
from trainfast_runner.records.search_directories import JOURNAL_FILE, conductor_lock, search_directories
from trainfast_runner.search.batch.batch_follower import BatchFollower
from trainfast_runner.search.batch.probe_record import confirmation_record
from trainfast_runner.search.batch.report import batch_report
from trainfast_runner.search.batch.state import BatchState, state_of_batch_journal
from trainfast_runner.search.control import pause, resume
from trainfast_runner.search.journal.batch import (
    BatchAnswer,
    BatchEnded,
    BatchLaunched,
    BatchQuestion,
    BatchStep,
    ConfirmationRun,
    Probe,
    read_batch_journal,
)
from trainfast_runner.search.journal.fitted_memory import MemoryFit, PhaseFit
from trainfast_runner.search.journal.lines import (
    Conducted,
    JournalWriter,
    Paused,
    Resumed,
    Waiting,
    worked_seconds,
)
from trainfast_runner.search.searches import BATCH_KIND, new_search, newest_search, unfinished


def test_every_line_is_read_back_and_a_half_written_one_is_left_out(tmp_path: Path) -> None:
    directory, journal = search(Home(tmp_path))
    line = PhaseFit(phase="forward_backward", fixed_bytes=1.0, bytes_per_sample=2.0)
    fit = MemoryFit(rank=0, lines=[line], limit_bytes=10)
    step = BatchStep(action="probe", batch_size=4, why="because", needs_bytes=9, memory_fits=[fit], tightest_rank=0)
    journal.write(step)
    with (directory / JOURNAL_FILE).open("ab") as file:
        file.write(b'{"kind":"probe","batch_')
    lines = read_batch_journal(directory)
    assert lines[1:] == [step]
    assert BatchFollower(directory).poll().memory_fits == (fit,)


def test_the_fit_of_the_tightest_rank_is_known_before_the_answer_and_after_a_step_without_a_fit(tmp_path: Path) -> None:
    directory, journal = search(Home(tmp_path))
    assert BatchFollower(directory).poll().tightest_fit is None
    line = PhaseFit(phase="forward_backward", fixed_bytes=1.0, bytes_per_sample=2.0)
    fits = [MemoryFit(rank=rank, lines=[line], limit_bytes=10 - rank) for rank in (0, 1)]
    journal.write(BatchStep(action="probe", batch_size=4, why="because", memory_fits=fits, tightest_rank=1))
    assert BatchFollower(directory).poll().tightest_fit == fits[1]
    journal.write(BatchStep(action="end", why="it is the largest"))
    assert BatchFollower(directory).poll().tightest_fit == fits[1]


def test_a_size_that_fitted_warm_and_not_in_its_confirmation_run_is_marked(tmp_path: Path) -> None:
    directory, journal = search(Home(tmp_path))
    for size in (8, 42):
        journal.write(Probe(batch_size=size, outcome="fits", run_id="warm", seconds=1.0))
    tried = state_of_batch_journal(read_batch_journal(directory))
    result = Result(run_id="cold", state="oom", knobs={"batch_size": 42}, reason="out of memory")
    journal.write(confirmation_record(tried, [], result, 42, 1.0))
    assert [line.refutes for line in read_batch_journal(directory) if isinstance(line, ConfirmationRun)] == [[42]]
    assert [probe["refuted_by"] for probe in batch_report(directory)["probes"]] == [None, "cold"]
    finished = Result(run_id="cold", state="finished", knobs={"batch_size": 42})
    assert confirmation_record(tried, [], finished, 42, 1.0).refutes == []


def test_the_step_of_a_confirmation_run_is_its_results_median() -> None:
    result = Result(run_id="r", state="finished", step_ms=StepTime(p50=1661.0))
    assert confirmation_record(BatchState("cpu", 1), [], result, 8, 1.0).step_ms == 1661.0


def test_what_follows_a_half_written_line_is_read(tmp_path: Path) -> None:
    directory, journal = search(Home(tmp_path))
    journal.close()
    with (directory / JOURNAL_FILE).open("ab") as file:
        file.write(b'{"kind":"probe","batch_')
    again = JournalWriter(directory)
    again.write(conducted())
    again.close()
    assert [type(line) for line in read_batch_journal(directory)] == [BatchQuestion, Conducted]


def test_a_journal_that_cannot_be_written_names_the_reason(tmp_path: Path) -> None:
    (tmp_path / JOURNAL_FILE).symlink_to("/dev/full")
    journal = JournalWriter(tmp_path)
    with pytest.raises(UserError, match=f"cannot use {tmp_path}: the disk is full"):
        journal.write(conducted())
    (tmp_path / JOURNAL_FILE).unlink()
    (tmp_path / JOURNAL_FILE).mkdir()
    with pytest.raises(UserError, match=f"cannot use {tmp_path}: Is a directory"):
        JournalWriter(tmp_path)


def test_a_search_of_a_newer_version_is_not_continued_and_its_unknown_lines_are_skipped(tmp_path: Path) -> None:
    home = Home(tmp_path)
    directory = new_search(home, "tiny-llama")
    journal = JournalWriter(directory)
    journal.write(replace(asked(directory), schema=SCHEMA + 1))
    with (directory / JOURNAL_FILE).open("ab") as file:
        file.write(b'{"kind":"dreamt","t_ns":1}\n')
    assert unfinished(home, "k", BATCH_KIND) is None
    seen = BatchFollower(directory).poll()
    assert (seen.state, seen.unreadable_lines) == ("interrupted", 1)


def test_a_command_continues_what_has_no_answer(tmp_path: Path) -> None:
    home = Home(tmp_path)
    assert unfinished(home, "k", BATCH_KIND) is None
    directory, journal = search(home)
    assert unfinished(home, "k", BATCH_KIND) == directory
    assert unfinished(home, "another", BATCH_KIND) is None
    journal.write(BatchEnded(state="cancelled"))
    assert unfinished(home, "k", BATCH_KIND) == directory
    journal.write(BatchEnded(state="answered", answer=BatchAnswer(max_batch=3, recommended_batch=2)))
    assert unfinished(home, "k", BATCH_KIND) is None


def test_what_a_screen_sees_from_the_first_line_to_the_answer(tmp_path: Path) -> None:
    directory, journal = search(Home(tmp_path))
    follower = BatchFollower(directory)
    assert follower.poll().state == "interrupted"
    with conductor_lock(directory):
        journal.write(conducted())
        assert follower.poll().state == "starting"
        journal.write(BatchLaunched(run_id="r", role="probe"))
        journal.write(BatchStep(t_ns=77, action="probe", batch_size=4, why="because"))
        seen = follower.poll()
        assert (seen.state, seen.run_id, seen.since_ns) == ("running", "r", 77)
        pause(directory)
        assert follower.poll().state == "pausing"
        journal.write(Paused())
        assert follower.poll().state == "paused"
        resume(directory)
        journal.write(Resumed())
        journal.write(Probe(batch_size=4, outcome="fits", run_id="r", seconds=1.0))
        seen = follower.poll()
        assert seen.state == "running"
        assert [probe.batch_size for probe in seen.probes] == [4]
        assert seen.is_live
        journal.write(BatchEnded(state="answered", answer=BatchAnswer(max_batch=4, recommended_batch=4)))
    seen = follower.poll()
    assert seen.state == "answered"
    assert not seen.is_live
    assert follower.poll() is seen, "a screen polls often, and most polls find nothing new"
    assert batch_report(directory)["max_batch"] == 4


def test_time_worked_leaves_pauses_and_gaps_out(tmp_path: Path) -> None:
    lines = [
        asked(tmp_path),
        conducted(10 * SECOND),
        BatchStep(t_ns=12 * SECOND, action="probe", why=""),
        Paused(t_ns=13 * SECOND),
        Resumed(t_ns=50 * SECOND),
        BatchLaunched(t_ns=52 * SECOND, run_id="r", role="probe"),
        conducted(100 * SECOND),
        BatchEnded(t_ns=101 * SECOND, state="answered"),
    ]
    assert worked_seconds(lines) == 3 + 2 + 1


def test_time_worked_leaves_waits_for_other_runs_out(tmp_path: Path) -> None:
    lines = [
        asked(tmp_path),
        conducted(10 * SECOND),
        Waiting(t_ns=12 * SECOND, run_id="another"),
        Resumed(t_ns=70 * SECOND),
        BatchLaunched(t_ns=71 * SECOND, run_id="r", role="probe"),
        Waiting(t_ns=73 * SECOND, run_id="another"),
        conducted(200 * SECOND),
        Waiting(t_ns=201 * SECOND, run_id="another"),
        BatchEnded(t_ns=300 * SECOND, state="cancelled"),
    ]
    assert worked_seconds(lines) == 2 + 3 + 1


def test_searches_that_cannot_be_listed_are_printed_not_taken_for_none(tmp_path: Path) -> None:
    home = Home(tmp_path)
    assert search_directories(home) == []
    (tmp_path / "searches").write_text("")
    for ask in (search_directories, newest_search, lambda home: unfinished(home, "k", BATCH_KIND)):
        with pytest.raises(UserError, match="a part of this path is a file"):
            ask(home)

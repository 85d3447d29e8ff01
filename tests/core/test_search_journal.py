"""A batch search's journal: its lines, the time worked, how it looks from outside; and who conducts the search."""

import errno
import os
import time
from contextlib import ExitStack

import pytest
from msgspec.structs import replace

from on_disk import batch_question, put, run_file
from plans import PLAN
from trainfast_runner.errors import UserError
from trainfast_runner.machine.processes import boot_id, identify
from trainfast_runner.records.home import JOURNAL_FILE, Home, conductor_lock, is_conducted, search_directories
from trainfast_runner.records.result import Result, RunError
from trainfast_runner.records.run_directory import shared_lock
from trainfast_runner.records.run_file import SCHEMA
from trainfast_runner.running import launch
from trainfast_runner.search import batch_conductor as conductor
from trainfast_runner.search import batch_journal, control, searches
from trainfast_runner.search.batch_conductor import BatchConductor, BatchPlan, confirmation_record
from trainfast_runner.search.batch_decide import BatchState
from trainfast_runner.search.batch_journal import BatchEnded, BatchSnapshot, BatchStep, Predicted, Probe, batch_report
from trainfast_runner.search.conductor import SearchCaller, conduct
from trainfast_runner.search.control import cancel, conductor_of, pause, resume
from trainfast_runner.search.journal import (
    Conducted,
    JournalFollower,
    JournalWriter,
    Launched,
    Paused,
    Resumed,
    Waiting,
    worked_seconds,
)
from trainfast_runner.search.searches import BATCH_KIND, SearchOptions, new_search, newest_search, unfinished
from trainfast_runner.settings.spec import resolve

SECOND, MIB = 1_000_000_000, 1 << 20


def asked(directory, key="k"):
    """The question of the search in this directory."""
    return batch_question(directory.name, key, world_size=2)


def conducted(t_ns=1):
    """The line of a conductor that began at this time, whose process is not this one."""
    return Conducted(t_ns=t_ns, pid=os.getpid(), start_ticks=1, boot_id=boot_id())


def search(home, key="k"):
    """The directory of a new search, and the writer of its journal."""
    directory = new_search(home, "tiny-llama")
    journal = JournalWriter(directory)
    journal.write(asked(directory, key))
    return directory, journal


def test_every_line_is_read_back_and_a_half_written_one_is_left_out_and_ended(tmp_path):
    directory, journal = search(Home(tmp_path))
    step = BatchStep(action="probe", batch_size=4, why="because")
    journal.write(step)
    with (directory / JOURNAL_FILE).open("ab") as file:
        file.write(b'{"kind":"probe","batch_')
    assert BatchSnapshot.read(directory).lines[1:] == (step,)
    JournalWriter(directory).write(conducted())
    assert BatchSnapshot.read(directory).lines[1:] == (step, conducted()), "the cut line is ended before the next"


def test_the_fit_of_the_tightest_rank_is_known_from_the_first_size_that_fits(tmp_path):
    assert JournalFollower(tmp_path, BatchSnapshot).poll().tightest_fit is None, "a journal without a line"
    directory, journal = search(Home(tmp_path))
    assert JournalFollower(directory, BatchSnapshot).poll().tightest_fit is None
    ranks = [batch_journal.RankPeaks(rank=n, phase_peaks={"step": 10}, available_bytes=100 - n) for n in range(2)]
    journal.write(Probe(batch_size=8, outcome="fits", run_id="r", seconds=1.0, ranks=ranks))
    journal.write(BatchStep(action="end", why="it is the largest"))
    assert JournalFollower(directory, BatchSnapshot).poll().tightest_fit.rank == 1


def test_a_size_that_fitted_warm_and_not_cold_is_marked_and_a_gpus_error_names_what_it_lacked(tmp_path):
    directory, journal = search(Home(tmp_path))
    for size in (8, 42):
        journal.write(Probe(batch_size=size, outcome="fits", run_id="warm", seconds=1.0))
    tried = BatchState(BatchSnapshot.read(directory).lines)
    result = Result(run_id="cold", state="oom", knobs={"batch_size": 42}, reason="out of memory")
    journal.write(confirmation_record(tried, [], result, 42, 1.0))
    assert [
        line.refutes for line in BatchSnapshot.read(directory).lines if isinstance(line, batch_journal.ConfirmationRun)
    ] == [[42]]
    assert [probe["refuted_by"] for probe in batch_report(directory)["probes"]] == [None, "cold"]
    finished = Result(run_id="cold", state="finished", knobs={"batch_size": 42})
    assert confirmation_record(tried, [], finished, 42, 1.0).refutes == []
    error = RunError(
        message="CUDA out of memory. Tried to allocate 954.00 MiB. GPU 0 has a total capacity of 79.18 GiB of which"
        " 63.34 GiB is free. Including non-PyTorch memory, this process has 15.83 GiB memory in use. 16.00 GiB allowed;"
        " Of the allocated memory 14.30 GiB is allocated by PyTorch, and 807.24 MiB is reserved by PyTorch but"
        " unallocated."
    )
    tried = BatchState((batch_question(device="cuda", limits_bytes=[16 << 30]),))
    result = Result(run_id="cold", state="oom", error=error)
    assert confirmation_record(tried, [], result, 32, 1.0).missing_bytes // MIB == 20
    unknown = Result(run_id="cold", state="oom", error=RunError(message="CUBLAS_STATUS_ALLOC_FAILED"))
    assert confirmation_record(tried, [], unknown, 32, 1.0).missing_bytes is None


def test_a_journal_that_cannot_be_written_names_the_reason(tmp_path):
    (tmp_path / JOURNAL_FILE).symlink_to("/dev/full")
    journal = JournalWriter(tmp_path)
    with pytest.raises(UserError, match=f"cannot use {tmp_path}: the disk is full"):
        journal.write(conducted())
    (tmp_path / JOURNAL_FILE).unlink()
    (tmp_path / JOURNAL_FILE).mkdir()
    with pytest.raises(UserError, match=f"cannot use {tmp_path}: Is a directory"):
        JournalWriter(tmp_path)


def test_a_search_of_a_newer_version_is_not_continued_and_its_unknown_lines_are_skipped(tmp_path):
    home = Home(tmp_path)
    directory = new_search(home, "tiny-llama")
    journal = JournalWriter(directory)
    journal.write(replace(asked(directory), schema=SCHEMA + 1))
    with (directory / JOURNAL_FILE).open("ab") as file:
        file.write(b'{"kind":"dreamt","t_ns":1}\n')
    assert unfinished(home, "k", BATCH_KIND) is None
    assert JournalFollower(directory, BatchSnapshot).poll().state == "interrupted"


def test_what_a_screen_sees_from_the_first_line_to_the_answer(tmp_path):
    directory, journal = search(Home(tmp_path))
    follower = JournalFollower(directory, BatchSnapshot)
    assert follower.poll().state == "interrupted"
    with conductor_lock(directory):
        journal.write(conducted())
        assert follower.poll().state == "starting"
        journal.write(Launched(run_id="r", role="probe"))
        journal.write(BatchStep(t_ns=77, action="probe", batch_size=4, why="because"))
        seen = follower.poll()
        assert (seen.state, seen.since_ns) == ("running", 77)
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
        journal.write(BatchEnded(state="answered", answer=batch_journal.BatchAnswer(max_batch=4, recommended_batch=4)))
    seen = follower.poll()
    assert seen.state == "answered"
    assert not seen.is_live
    assert follower.poll() is seen, "a screen polls often, and most polls find nothing new"
    assert batch_report(directory)["max_batch"] == 4


STEP, LAUNCHED = BatchStep(action="probe", why=""), Launched(run_id="r", role="probe")
WAITING, ENDED = Waiting(run_id="another"), BatchEnded(state="answered")
BEGUN, AGAIN = (10, conducted()), (100, conducted())


@pytest.mark.parametrize(
    ("lines", "worked_s"),
    [
        ([BEGUN, (12, STEP), (13, Paused()), (50, Resumed()), (52, LAUNCHED), AGAIN, (101, ENDED)], 3 + 2 + 1),
        (
            [BEGUN, (12, WAITING), (70, Resumed()), (71, LAUNCHED), (73, WAITING), AGAIN, (101, WAITING), (200, ENDED)],
            2 + 3 + 1,
        ),
    ],
    ids=["pauses and gaps", "other runs"],
)
def test_time_worked_leaves_waits_out(tmp_path, lines, worked_s):
    timed = [replace(line, t_ns=at_s * SECOND) for at_s, line in lines]
    assert worked_seconds([asked(tmp_path), *timed]) == worked_s


def test_searches_that_cannot_be_listed_are_printed_not_taken_for_none(tmp_path):
    home = Home(tmp_path)
    assert search_directories(home) == []
    (tmp_path / "searches").write_text("")
    for ask in (search_directories, newest_search, lambda home: unfinished(home, "k", BATCH_KIND)):
        with pytest.raises(UserError, match="a part of this path is a file"):
            ask(home)


def test_one_process_conducts_a_search_and_only_that_very_process_is_signalled(tmp_path):
    directory, _ = search(Home(tmp_path))
    assert not is_conducted(directory)
    with conductor_lock(directory) as held:
        assert held
        assert is_conducted(directory)
        with conductor_lock(directory) as again:
            assert not again
    assert not is_conducted(directory)
    JournalWriter(directory).write(conducted())
    assert conductor_of(directory) is None
    assert not cancel(directory)
    with conductor_lock(directory):
        # This process has the pid on record, but did not start when the record says.
        assert conductor_of(directory) is not None
        assert not cancel(directory)


def test_a_search_that_needs_more_than_is_free_now_begins_anew(tmp_path, monkeypatch):
    home, free = Home(tmp_path), [8 << 30]
    for module in (searches, conductor):
        monkeypatch.setattr(module, "read_host_free_bytes", lambda: free[0])
    first = conductor.open_batch(BatchPlan(PLAN), home, SearchOptions())
    free[0] -= 512 * MIB
    assert conductor.open_batch(BatchPlan(PLAN), home, SearchOptions()) == first, "its limit is 0.9 of what was free"
    free[0] = 1 << 30
    with conductor_lock(first):
        assert conductor.open_batch(BatchPlan(PLAN), home, SearchOptions()) == first, "its processes hold the memory"
    second = conductor.open_batch(BatchPlan(PLAN), home, SearchOptions())
    assert second != first
    assert sum(BatchSnapshot.read(second).lines[0].limits_bytes) <= free[0]


def a_run(home, directory, *, role=None, steps=10, state=""):
    """A confirmation run of the search in `directory`, or with no role a run of somebody else's."""
    _, run_directory = home.new_run("tiny-llama")
    spec = PLAN.spec.with_overrides(batch_size=4, steps=steps, timing_warmup=min(3, steps - 1))
    run = run_file(
        run_id=run_directory.name,
        **spec.record_fields(),
        device="cpu",
        role=role,
        search_id=None if role is None else directory.name,
    )
    put(run_directory / "run.json", run)
    if state:
        result = Result(run_id=run_directory.name, state=state, knobs=run.knobs)
        put(run_directory / "result.json", result)
    return run_directory


def confirming(monkeypatch, started):
    """Let a search confirm 4 until a run has finished with it; `started` takes the place of a launch."""

    def decided(state):
        if state.confirmations:
            return BatchStep(action="end", why="because", end_state="failed")
        return BatchStep(action="prove", batch_size=4, why="because")

    monkeypatch.setattr(conductor, "decide", decided)
    monkeypatch.setattr(launch, "start", started)


def test_a_search_that_waits_for_another_run_says_so_in_its_journal(tmp_path, monkeypatch):
    home = Home(tmp_path).create()
    directory, journal = search(home)
    journal.write(Predicted(reason="nothing is predicted"))
    other = a_run(home, directory)
    monkeypatch.setattr(launch.time, "sleep", lambda seconds: None)

    def started(plan, home, on_wait):
        return a_run(home, directory, role="proof", state="finished")

    confirming(monkeypatch, started)
    with ExitStack() as held:
        held.enter_context(shared_lock(other))
        looks = []

        def is_cancelled():
            looks.append(None)
            if len(looks) == 5:
                held.close()
            return False

        conduct(
            BatchConductor, directory, BatchPlan(PLAN), home, SearchOptions(wait=True),
            SearchCaller(is_cancelled=is_cancelled),
        )  # fmt: skip
    kinds = [type(line) for line in BatchSnapshot.read(directory).lines]
    assert kinds[3:7] == [BatchStep, Waiting, Resumed, Launched]
    waiting = next(line for line in BatchSnapshot.read(directory).lines if isinstance(line, Waiting))
    assert waiting.run_id == other.name


@pytest.mark.parametrize(
    ("error", "raised", "state", "reason"),
    [
        (ZeroDivisionError("division by zero"), ZeroDivisionError, "failed", "ZeroDivisionError: division by zero"),
        (OSError(errno.ENOSPC, "no space", "/tmp/x"), UserError, "cancelled", "cannot use /tmp/x: the disk is full"),
    ],
    ids=["an error of our own", "a full disk"],
)
def test_an_error_ends_the_search_in_its_journal(tmp_path, monkeypatch, error, raised, state, reason):
    directory, journal = search(Home(tmp_path))
    journal.write(Predicted(reason="nothing is predicted"))

    def broken(_state):
        raise error

    monkeypatch.setattr(conductor, "decide", broken)
    with pytest.raises(raised):
        conduct(BatchConductor, directory, BatchPlan(PLAN), Home(tmp_path), SearchOptions(), SearchCaller())
    seen = JournalFollower(directory, BatchSnapshot).poll()
    assert (seen.state, seen.is_live) == (state, False)
    assert seen.ended.reason.startswith(reason)


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("raise RuntimeError('the reason')", "the search process ended before it answered: RuntimeError: the reason"),
        ("import signal; signal.pause()", "the search process did not answer within 3 s"),
    ],
)
def test_f13_a_conductor_that_hangs_or_dies_at_birth_ends_the_start_and_says_why(tmp_path, monkeypatch, program, words):
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

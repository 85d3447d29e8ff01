"""The result of a run that has ended, written by its supervisor, or by the next reader of a run left behind.

The verdict is certain; a bug in the analysis costs the figures only.
"""

from __future__ import annotations

import contextlib
import os
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from trainfast_runner.errors import UserError
from trainfast_runner.memory.headroom import with_prediction
from trainfast_runner.records.home import Home
from trainfast_runner.records.json_lines import write_atomically
from trainfast_runner.records.result import Result
from trainfast_runner.records.run_directory import (
    END_STATES,
    EXIT_CODES,
    RESULT_FILE,
    is_alive,
    open_lock,
    read_result,
    read_run_file,
    read_written_result,
    try_exclusive_lock,
    unreadable_reason,
)
from trainfast_runner.records.run_lines import Event
from trainfast_runner.records.run_records import RunRecords, read_records, read_worker_lines
from trainfast_runner.records.worker_lines import ExceptionLine, FinishedLine, InvalidLine, error_of
from trainfast_runner.results.summary import summarise, without_figures
from trainfast_runner.results.verdict import Verdict, one_line
from trainfast_runner.running.present_state import LEFT_BEHIND, is_result_newer, is_whole, other_host, run_state
from trainfast_runner.running.scripts.contained import remove_sandbox
from trainfast_runner.units import counted
from trainfast_runner.worker.shared.host import ALIVE_LOCK_FILE

NO_FIGURES = "the figures of this run could not be computed"


def read_records_or_note_trouble(directory: Path) -> RunRecords:
    """The records of a run; if reading them fails, the ranks' lines alone, and a trouble that names the error."""
    try:
        return read_records(directory)
    except Exception as error:
        records = RunRecords(run=read_run_file(directory))
        with suppress(Exception):
            records.worker_lines = read_worker_lines(directory, records)
        add_trouble(records, _failure("the records of this run could not be read", error))
        return records


def add_trouble(records: RunRecords, sentence: str) -> None:
    """Add a trouble that is not on the disk, for the result to name."""
    records.events.append(Event(t_ns=time.monotonic_ns(), kind="trouble", detail=sentence))


def write_provisional_result(directory: Path, records: RunRecords, verdict: Verdict, ended_ns: int | None) -> None:
    """Write `result.json` without figures, before the analysis begins. Raises OSError."""
    result = without_figures(directory, records, verdict, ended_ns)
    write_result(directory, msgspec.structs.replace(result, provisional=True))


def result_with_figures(directory: Path, records: RunRecords, verdict: Verdict, ended_ns: int | None) -> Result:
    """The result with all its figures; without them, and with a trouble that names the error, if the analysis fails."""
    try:
        return summarise(directory, with_prediction(records), verdict, ended_ns)
    except Exception as error:
        result = without_figures(directory, records, verdict, ended_ns)
        return msgspec.structs.replace(result, troubles=[*result.troubles, _failure(NO_FIGURES, error)])


def write_result(directory: Path, result: Result) -> None:
    """Write `result.json`. Raises OSError."""
    write_atomically(directory / RESULT_FILE, msgspec.json.encode(result) + b"\n")


def _failure(subject: str, error: Exception) -> str:
    """The error, with the file and line that raised it, in one line."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    message = " ".join(f"{type(error).__name__}: {error}".split())
    return f"{subject}: {message} ({Path(frame.filename).name}, line {frame.lineno})"


def recover_result(directory: Path) -> Result | None:
    """The result of a run that has ended, written now from its records when its supervisor could not.

    None while anything of it is alive, where a file is unreadable, on another machine than the run's, and where a newer
    version wrote the result in a way that this one cannot read. In a home that cannot be written the result is given
    all the same.
    """
    result = read_result(directory)
    run = read_run_file(directory)
    if is_whole(result) or run is None or other_host(run) is not None or unreadable_reason(directory) is not None:
        return result
    with _exclusive_lock(directory) as is_ours:
        if not is_ours:
            return read_result(directory)
        # The last holder of the lock may have written the result.
        result = read_written_result(directory)
        if is_whole(result) or is_result_newer(directory):
            return result
        records = read_records_or_note_trouble(directory)
        verdict = (
            lost_verdict(records, LEFT_BEHIND) if result is None else Verdict(result.state, result.reason, result.error)
        )
        result = result_with_figures(directory, records, verdict, records.last_t_ns())
        with contextlib.suppress(OSError):  # A full or read-only disk: the next reader tries again.
            write_result(directory, result)
        remove_sandbox(directory)
        return result


def lost_verdict(records: RunRecords, reason: str) -> Verdict:
    """The verdict on a run whose supervisor died: `reason`, and the end that its records show."""
    steps = max((steps_of_rank[-1].step for steps_of_rank in records.steps.values() if steps_of_rank), default=0)
    parts = [f"{counted(steps, 'step')} recorded"]
    world_size = records.run.world_size if records.run else 1
    ends = {
        rank: line
        for rank, lines in records.worker_lines.items()
        for line in lines
        if isinstance(line, FinishedLine | ExceptionLine | InvalidLine)
    }
    first_failure = next(((rank, line) for rank, line in ends.items() if not isinstance(line, FinishedLine)), None)
    error = None
    if first_failure is not None:
        rank, line = first_failure
        error = error_of(line, rank)
        parts.append(f"rank {rank} had recorded {error.type}: {one_line(error.message or '')}")
    elif len(ends) >= world_size:
        parts.append("every rank had recorded that it finished")
    else:
        parts.append("no end was recorded")
    judged_event = next(
        (event for event in reversed(records.events) if event.kind == "state" and event.state in END_STATES), None
    )
    if judged_event is not None:
        parts.append(f"the supervisor's own verdict was {judged_event.state}: {judged_event.reason}")
    return Verdict("lost", f"{reason}: {'; '.join(parts)}", error)


@contextlib.contextmanager
def _exclusive_lock(directory: Path) -> Iterator[bool]:
    """Hold the run's lock for this reader alone; yield False if another process keeps it longer than a reader would."""
    try:
        fd = open_lock(directory / ALIVE_LOCK_FILE)
    except FileNotFoundError:
        # Without a lock file no process can hold it.
        yield True
        return
    try:
        yield try_exclusive_lock(fd)
    finally:
        os.close(fd)


def result_or_none_while_live(directory: Path) -> Result | None:
    """Return the result, or None while the run is alive; raises UserError for a directory without records."""
    result = recover_result(directory)
    if result is None and (state := run_state(directory)).ended:
        is_unreadable = state.state == "unreadable"
        if not is_unreadable and is_alive(directory):
            return None  # its supervisor is about to write the result
        # It may have ended between the two looks.
        result = recover_result(directory)
        if result is None:
            raise UserError(
                f"{directory.name} has no result: {state.reason}",
                key=directory.name,
                exit_code=EXIT_CODES["unreadable" if is_unreadable else "lost"],
            )
    return result


def final_result(home: Home, run_id: str, command: str = "compare") -> Result:
    """Return the result of an ended run.

    Raises UserError while the run is alive, advising to repeat `command` after its end.
    """
    result = result_or_none_while_live(home.directory(run_id))
    if result is None:
        raise UserError(
            f"{run_id} is still running: its figures are not final",
            key=run_id,
            advice=f"trainfast-tui attach {run_id}, then {command}",
        )
    return result

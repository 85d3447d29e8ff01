"""The result of a run that has ended. The verdict is certain; a bug in the analysis costs the figures only."""

from __future__ import annotations

import time
import traceback
from contextlib import suppress
from pathlib import Path

import msgspec

from trainfast_runner.memory.headroom import with_prediction
from trainfast_runner.records.json_lines import write_atomically
from trainfast_runner.records.result import Result
from trainfast_runner.records.run_directory import RESULT_FILE, read_run_file
from trainfast_runner.records.run_lines import Event
from trainfast_runner.records.run_records import RunRecords, read_records, read_worker_lines
from trainfast_runner.results.summary import summarise, without_figures
from trainfast_runner.results.verdict import Verdict

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

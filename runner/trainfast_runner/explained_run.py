"""An out of memory explained from a run's records and from the models traced by now; and more of them traced for it."""

from __future__ import annotations

import threading
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from trainfast_runner.asked_and_ran import as_fields, what_ran
from trainfast_runner.records import Actual, RunFile
from trainfast_runner.result import OomExplanation, Result, RunError
from trainfast_runner.run_records import RunRecords, read_records

if TYPE_CHECKING:
    from trainfast_runner.memory_model import MemoryModel
    from trainfast_runner.spec import RunSpec


def explanation_of(records: RunRecords, reason: str, error: RunError | None) -> OomExplanation | None:
    """Why memory ran out in this run; None without its `run.json`. Nothing is traced for it."""
    run = records.run
    if run is None:
        return None
    from trainfast_runner.memory_model import cached_model
    from trainfast_runner.oom_explained import explain

    ran = what_ran(records.worker)
    sizes = {} if ran is None else as_fields(ran, Actual)
    rank = error.rank if error is not None else None
    held = [line.held_bytes for line in records.worker.get(rank or 0, []) if line.kind == "exception"]

    def model_of(spec: RunSpec) -> MemoryModel | None:
        return cached_model(spec, run.device, run.python or None)

    try:
        return explain(
            run,
            error,
            reason,
            model_of,
            events=records.events,
            parameters=sizes,
            held_bytes=held[-1] if held else None,
        )
    except Exception as problem:
        # The result of a run does not depend on arithmetic about it; what went wrong there is kept with it.
        return OomExplanation(basis=f"could not be explained: {type(problem).__name__}: {problem}")


def explained_now(directory: Path, result: Result) -> Result:
    """The result with what is known by now of why memory ran out, where that is more than when it was written."""
    if result.state != "oom":
        return result
    found = explanation_of(read_records(directory), result.reason, result.error)
    known = result.oom
    if found is None or (found.needed_bytes is None and known is not None and known.needed_bytes is not None):
        return result
    return msgspec.structs.replace(result, oom=found)


def trace_changes(
    run: RunFile, error: RunError | None, python: str | None = None, given_up: threading.Event | None = None
) -> Generator[int]:
    """Have the run's model traced, and what each change of a knob makes of it; before each, how many are left.

    Ends early once `given_up` is set. Raises Problem where the training Python cannot be asked.
    """
    from trainfast_runner.memory_model import cached_model, trace_models
    from trainfast_runner.oom_explained import candidates
    from trainfast_runner.spec import of_record
    from trainfast_runner.training_python import GivenUp

    python = python or run.python or None
    spec = of_record(run)
    wanted = [spec, *candidates(spec, run.device, error.phase if error is not None else None)]
    missing = [one for one in wanted if cached_model(one, run.device, python) is None]
    if not missing:
        return
    left = len(missing)
    yield left
    try:
        for _ in trace_models(missing, run.device, python, given_up=given_up):
            left -= 1
            if left:
                yield left
    except GivenUp:
        return

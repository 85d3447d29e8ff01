"""After an out-of-memory error: trace which changes of knobs would make the run fit."""

from __future__ import annotations

import threading
from pathlib import Path

from trainfast_runner.errors import UserError
from trainfast_runner.memory.oom.explain_run import out_of_memory_of, with_newer_explanation
from trainfast_runner.memory.oom.trace_changes import trace_changes
from trainfast_runner.records.result import Result
from trainfast_runner.records.run_directory import read_run_file
from trainfast_runner.records.run_records import read_records
from trainfast_tui.cli.printing.progress import progress_when_slow

TRACES_WITHIN_S = 20.0
"""Chosen, not measured: after an out-of-memory error, trace possible fixes for at most this long."""


def with_traced_changes(directory: Path, result: Result, python: str | None) -> Result:
    """Return the result of an out-of-memory run with the changes that would fit; a script has none.

    The tracing ends after `TRACES_WITHIN_S` or at Ctrl-C.
    """
    run_file = read_run_file(directory)
    if run_file is None or run_file.script is not None:
        return result
    oom_run = out_of_memory_of(read_records(directory), run_file, result.reason, result.error)
    cancelled = threading.Event()
    timer = threading.Timer(TRACES_WITHIN_S, cancelled.set)
    timer.daemon = True
    timer.start()
    try:
        with progress_when_slow("tracing which changes would make it fit…") as progress:
            for traces_left in trace_changes(oom_run, python, cancelled):
                progress.update(f"tracing which changes would make it fit, {traces_left} to go…")
    except (UserError, KeyboardInterrupt):
        pass  # changes without a trace stay estimates
    finally:
        timer.cancel()
    return with_newer_explanation(directory, result)

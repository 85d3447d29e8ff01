"""After an out-of-memory error: print the verdict at once, then the changes of knobs that would make the run fit."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from trainfast_runner.errors import UserError
from trainfast_runner.memory.oom.explain import OutOfMemory
from trainfast_runner.memory.oom.explain_run import out_of_memory_of, with_newer_explanation
from trainfast_runner.memory.oom.trace_changes import trace_changes
from trainfast_runner.records.result import Result
from trainfast_runner.records.run_directory import read_run_file
from trainfast_runner.records.run_records import read_records
from trainfast_runner.records.run_states import exit_code_of
from trainfast_tui.cli.printing.output import print_json, print_lines, print_notice
from trainfast_tui.cli.printing.progress import progress_when_slow
from trainfast_tui.cli.printing.summary import figure_lines, oom_lines
from trainfast_tui.text.result_figures import headline

TRACES_WITHIN_S, ENDED_WITHIN_S = 3.5, 1.0
"""Chosen, not measured: the most seconds for traces, and for the tracing process to end after them. The command is over
within 6 s of the training."""


def print_out_of_memory(directory: Path, result: Result, python: str | None, as_json: bool) -> int:
    """Print the result of an out-of-memory run, its verdict before any trace; return its exit code."""
    if as_json:
        print_notice(headline(result))
    else:
        print_lines(figure_lines(result))
        sys.stdout.flush()
    result = with_traced_changes(directory, result, python)
    if as_json:
        print_json(result)
    else:
        print_lines(oom_lines(result))
    return exit_code_of(result.state)


def with_traced_changes(directory: Path, result: Result, python: str | None) -> Result:
    """Return the result of an out-of-memory run with the changes that would fit; a script has none.

    The tracing ends after `TRACES_WITHIN_S` or at Ctrl-C; changes without a trace stay estimates.
    """
    run_file = read_run_file(directory)
    if run_file is None or run_file.script is not None:
        return result
    oom_run = out_of_memory_of(read_records(directory), run_file, result.reason, result.error)
    cancelled = threading.Event()
    tracing = threading.Thread(target=_trace, args=(oom_run, python, cancelled), daemon=True)
    try:
        with progress_when_slow("tracing which changes would make it fit…"):
            tracing.start()
            tracing.join(TRACES_WITHIN_S)
            cancelled.set()
            tracing.join(ENDED_WITHIN_S)
    except KeyboardInterrupt:
        cancelled.set()
    return with_newer_explanation(directory, result)


def _trace(oom_run: OutOfMemory, python: str | None, cancelled: threading.Event) -> None:
    try:
        for _ in trace_changes(oom_run, python, cancelled):
            pass  # the trace is in the cache now
    except UserError:
        return

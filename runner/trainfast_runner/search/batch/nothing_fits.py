"""The end of a search in which a batch of 1 does not fit: the missing bytes, and knob changes that would help."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import msgspec

from trainfast_runner.errors import UserError
from trainfast_runner.memory.oom.explain import OutOfMemory
from trainfast_runner.memory.oom.explain_run import explain_run, held_bytes_of, models_of
from trainfast_runner.memory.oom.trace_changes import trace_changes
from trainfast_runner.records.home import Home
from trainfast_runner.records.result import OomExplanation, RunError
from trainfast_runner.records.run_directory import read_result, read_run_file
from trainfast_runner.records.run_records import read_records
from trainfast_runner.running.planning import RunPlan
from trainfast_runner.search.batch.state import BatchState
from trainfast_runner.search.conducting.waiting import wait_until
from trainfast_runner.search.journal.batch import BatchEnded, Change, ConfirmationRun, Probe

TRACE_CHANGES_WITHIN_S = 30.0
"""If nothing fits, changes that would help are traced for at most this long."""


def explain_nothing_fits(
    plan: RunPlan, home: Home, state: BatchState, reason: str, raise_if_cancelled: Callable[[], None]
) -> BatchEnded:
    """Return the end of a search without an answer. `raise_if_cancelled` is called throughout the traces."""
    failed_run = _smallest_failure(state)
    run = read_run_file(home.directory(failed_run.run_id)) if failed_run is not None else None
    if failed_run is None or run is None:
        return BatchEnded(state="nothing_fits", reason=reason)
    phase = failed_run.phase if isinstance(failed_run, Probe) else None
    # No changes are explained for a probe, so the run has no role here.
    run_of_one = msgspec.structs.replace(run, role=None, knobs={**run.knobs, "batch_size": 1}, predicted=None)
    result = read_result(home.directory(failed_run.run_id))
    rank = failed_run.rank if isinstance(failed_run, Probe) else None
    error = (result.error if result is not None else None) or RunError(
        rank=rank, phase=phase, message=failed_run.reason
    )
    held_bytes = failed_run.peak_allocated_bytes if isinstance(failed_run, Probe) else None
    if held_bytes is None and failed_run.batch_size == 1:
        held_bytes = held_bytes_of(read_records(home.directory(failed_run.run_id)), error)
    oom_run = OutOfMemory(run=run_of_one, reason=failed_run.reason, error=error, held_bytes=held_bytes)
    _trace_changes(oom_run, plan.python, raise_if_cancelled)
    explained = explain_run(oom_run, models_of(run_of_one, plan.python))
    least_missing_bytes = missing_bytes(explained, failed_run)
    changes = [
        Change(**msgspec.structs.asdict(change)) for change in explained.changes if "batch_size" not in change.settings
    ]
    return BatchEnded(state="nothing_fits", reason=reason, missing_bytes=least_missing_bytes, changes=changes)


def _trace_changes(oom_run: OutOfMemory, python: str, raise_if_cancelled: Callable[[], None]) -> None:
    """Trace the memory models of changes that may be enough; those not traced in time are listed unpredicted."""
    cancelled = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        traces = pool.submit(lambda: list(trace_changes(oom_run, python, cancelled)))
        try:
            wait_until(traces.done, raise_if_cancelled, time.monotonic() + TRACE_CHANGES_WITHIN_S)
        finally:
            cancelled.set()
    with suppress(UserError):
        traces.result()


def missing_bytes(explained: OomExplanation, failed_run: Probe | ConfirmationRun) -> int | None:
    """Return the missing bytes by the prediction, the peak beyond the limit, or the last request; None if unknown."""
    if explained.missing_bytes is not None:
        return explained.missing_bytes
    excess_bytes = 0
    if explained.limit_bytes is not None and failed_run.peak_allocated_bytes is not None:
        excess_bytes = failed_run.peak_allocated_bytes - explained.limit_bytes
    return excess_bytes if excess_bytes > 0 else explained.asked_bytes


def _smallest_failure(state: BatchState) -> Probe | ConfirmationRun | None:
    """Return the smallest size that ran out of memory; None if none did."""
    failed_runs: list[Probe | ConfirmationRun] = [probe for probe in state.probes if probe.outcome == "oom"]
    failed_runs += [confirmation for confirmation in state.confirmations if confirmation.state == "oom"]
    return min(failed_runs, key=lambda probe: probe.batch_size, default=None)

"""The explanation of a run that ran out of memory, by the models traced so far."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec

from trainfast_runner.known_values import highest
from trainfast_runner.memory.oom.explain import OutOfMemory, explain_preset
from trainfast_runner.memory.oom.explain_script import explain_script
from trainfast_runner.memory.oom.predicted_changes import ModelOf
from trainfast_runner.records.json_lines import newest
from trainfast_runner.records.result import OomExplanation, Result, RunError
from trainfast_runner.records.roles import WARM_ROLES
from trainfast_runner.records.run_file import RunFile
from trainfast_runner.records.run_records import RunRecords, read_records
from trainfast_runner.records.warm_process import batch_sizes
from trainfast_runner.records.worker_lines import ExceptionLine


def explain_run(oom_run: OutOfMemory, model_of: ModelOf) -> OomExplanation:
    """Explain why a run ran out of memory, with the changes that would fit: by traced memory models, else by estimate.

    For a search's warm process the knobs are those tried last, and no changes are given: the search goes on.
    """
    run = oom_run.run
    if run.script is not None:
        return explain_script(oom_run, run.script)
    if run.role not in WARM_ROLES:
        return explain_preset(oom_run, model_of)
    if not oom_run.tried:
        return OomExplanation(phase=oom_run.phase, held_bytes=oom_run.held_bytes, basis="no batch was tried yet")
    # The prediction in `run.json` is for the preset's knobs.
    tried_run = msgspec.structs.replace(run, knobs={**run.knobs, **oom_run.tried[-1]}, predicted=None)
    explanation = explain_preset(dataclasses.replace(oom_run, run=tried_run), model_of)
    return msgspec.structs.replace(explanation, batch_size=tried_run.knobs["batch_size"], changes=[])


def out_of_memory_of(records: RunRecords, run: RunFile, reason: str, error: RunError | None) -> OutOfMemory:
    """Gather the records of `run`, which ran out of memory."""
    return OutOfMemory(
        run=run,
        reason=reason,
        error=error,
        held_bytes=held_bytes_of(records, error),
        host_bytes=highest(sample.memory_available_bytes for _, sample in records.host_samples),
        events=records.events,
        tried=records.tried,
        in_first_step=run.role not in WARM_ROLES and not any(records.steps.values()),
    )


def explain_records(records: RunRecords, reason: str, error: RunError | None) -> OomExplanation | None:
    """Explain why this run ran out of memory, by the traces made so far; None without `run.json`."""
    run = records.run
    if run is None:
        return None
    try:
        return explain_run(out_of_memory_of(records, run, reason, error), models_of(run))
    except Exception as problem:
        # A bug in the explanation must not cost the run its result.
        return OomExplanation(basis=f"could not be explained: {type(problem).__name__}: {problem}")


def held_bytes_of(records: RunRecords, error: RunError | None) -> int | None:
    """The most bytes that the failed rank held in the phase it failed in, as it recorded them."""
    rank = error.rank if error is not None else None
    line = newest(records.worker_lines.get(rank or 0, []), ExceptionLine)
    return None if line is None else line.held_bytes


def models_of(run: RunFile, python: str | None = None) -> ModelOf:
    """The memory models traced so far for the run's GPU; `python` replaces the one it trained in."""
    # Imported late: the supervisor starts without the tracer, which only a run that ran out of memory needs.
    from trainfast_runner.memory.tracing import cached_models

    return cached_models(run.device, python or run.python or None, next(iter(run.device_names), None))


def with_newer_explanation(directory: Path, result: Result) -> Result:
    """The result with a newer explanation of running out of memory, if more is known than when it was written."""
    if result.state != "oom":
        return result
    records, recorded_oom = read_records(directory), result.oom
    explanation = explain_records(records, result.reason, result.error)
    if result.role in WARM_ROLES and not result.tried:
        # An older version explained the failure by the preset's batch.
        return msgspec.structs.replace(result, oom=explanation, tried=batch_sizes(records.tried))
    if explanation is None or (
        explanation.needed_bytes is None and recorded_oom is not None and recorded_oom.needed_bytes is not None
    ):
        return result
    return msgspec.structs.replace(result, oom=explanation)

"""The explanation of a run that ran out of memory, by the models traced so far; and further traces for it."""

from __future__ import annotations

import threading
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from trainfast_runner.machine.worker_scripts import ScriptCancelled
from trainfast_runner.memory.oom_candidates import specs_with_one_change, specs_with_several_changes
from trainfast_runner.memory.oom_changes import ModelOf, is_enough
from trainfast_runner.memory.oom_explained import OutOfMemory, explain
from trainfast_runner.records.json_lines import newest
from trainfast_runner.records.result import OomExplanation, Result, RunError
from trainfast_runner.records.run_file import WARM_ROLES, RunFile
from trainfast_runner.records.run_records import RunRecords, read_records
from trainfast_runner.records.warm_process import batch_sizes
from trainfast_runner.records.worker_lines import ExceptionLine
from trainfast_runner.results.script_oom import explain_script
from trainfast_runner.settings.spec import spec_of_record
from trainfast_runner.units import highest

if TYPE_CHECKING:
    from trainfast_runner.memory.warm_tracer import WarmTracer
    from trainfast_runner.settings.spec import RunSpec


def explain_run(oom_run: OutOfMemory, model_of: ModelOf) -> OomExplanation:
    """The cause, and the changes that would fit: by the traced memory models, or by estimate without one.

    For a search's warm process the knobs are those tried last, and no changes are given: the search goes on.
    """
    run = oom_run.run
    if run.script is not None:
        return explain_script(oom_run, run.script)
    if run.role not in WARM_ROLES:
        return explain(oom_run, model_of)
    if not oom_run.tried:
        return OomExplanation(phase=oom_run.phase, held_bytes=oom_run.held_bytes, basis="no batch was tried yet")
    # The prediction in `run.json` is for the preset's knobs.
    tried_run = msgspec.structs.replace(run, knobs={**run.knobs, **oom_run.tried[-1]}, predicted=None)
    explanation = explain(replace(oom_run, run=tried_run), model_of)
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


def explanation_of(records: RunRecords, reason: str, error: RunError | None) -> OomExplanation | None:
    """The cause of this run's lack of memory, without new traces; None without `run.json`."""
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
    # Imported late, here and below: the supervisor starts without the tracer, which only a lack of memory needs.
    from trainfast_runner.memory.tracing import cached_models

    return cached_models(run.device, python or run.python or None, next(iter(run.device_names), None))


def with_newer_explanation(directory: Path, result: Result) -> Result:
    """The result with a newer explanation of its lack of memory, if more is known than when it was written."""
    if result.state != "oom":
        return result
    records, recorded_oom = read_records(directory), result.oom
    explanation = explanation_of(records, result.reason, result.error)
    if result.role in WARM_ROLES and not result.tried:
        # An older version explained it by the preset's batch.
        return msgspec.structs.replace(result, oom=explanation, tried=batch_sizes(records.tried))
    if explanation is None or (
        explanation.needed_bytes is None and recorded_oom is not None and recorded_oom.needed_bytes is not None
    ):
        return result
    return msgspec.structs.replace(result, oom=explanation)


def trace_changes(
    oom_run: OutOfMemory,
    python: str | None = None,
    cancelled: threading.Event | None = None,
    tracer: WarmTracer | None = None,
) -> Generator[int]:
    """Trace the run's model with each change of a knob, and with several changes if no single one is enough.

    `python` traces, None for the one that trained; `tracer` is a tracing process to use.

    Yields the number of remaining traces before each. Ends early once `cancelled` is set. Raises UserError when the
    training Python cannot be asked.
    """
    run, phase = oom_run.run, oom_run.phase
    if run.script is not None:
        return
    spec = spec_of_record(run)
    python = python or run.python or None
    try:
        yield from _trace([spec, *specs_with_one_change(spec, run.device, phase)], run, python, cancelled, tracer)
        if not _is_cured(oom_run, python):
            yield from _trace(specs_with_several_changes(spec, run.device, phase), run, python, cancelled, tracer)
    except ScriptCancelled:
        return


def _trace(
    specs: list[RunSpec],
    run: RunFile,
    python: str | None,
    cancelled: threading.Event | None,
    tracer: WarmTracer | None,
) -> Generator[int]:
    from trainfast_runner.memory.tracing import cached_models, trace_models

    model_of = cached_models(run.device, python)
    missing = [spec for spec in specs if model_of(spec) is None]
    if not missing:
        return
    yield len(missing)
    traces = trace_models(missing, run.device, python, cancelled=cancelled, gpus=run.device_uuids, tracer=tracer)
    for done, _ in enumerate(traces, 1):
        if done < len(missing):
            yield len(missing) - done


def _is_cured(oom_run: OutOfMemory, python: str | None) -> bool:
    """True if a known change fits, or if there is no limit to fit into."""
    explanation = explain_run(oom_run, models_of(oom_run.run, python))
    return explanation.limit_bytes is None or any(map(is_enough, explanation.changes))

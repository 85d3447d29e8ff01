"""The explanation of a run that ran out of memory, by the models traced so far; and further traces for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from trainfast_runner.machine.worker_scripts import ScriptCancelled
from trainfast_runner.memory.oom_changes import candidates, combined, is_enough
from trainfast_runner.records.result import OomExplanation, Result, RunError
from trainfast_runner.records.run_file import WARM_ROLES, RunFile
from trainfast_runner.records.run_lines import Event
from trainfast_runner.records.run_records import RunRecords, read_records
from trainfast_runner.records.warm_process import batch_sizes
from trainfast_runner.results.script_oom import explain_script
from trainfast_runner.settings.spec import spec_of_record
from trainfast_runner.units import highest

if TYPE_CHECKING:
    from trainfast_runner.memory.model import MemoryModel
    from trainfast_runner.memory.warm_tracer import WarmTracer
    from trainfast_runner.settings.spec import RunSpec


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """The records of a run that ran out of memory."""

    run: RunFile
    reason: str
    error: RunError | None
    held_bytes: int | None
    """Bytes that the failed rank held, as it recorded them."""
    host_bytes: int | None
    """The most memory that the host had available during the run; None without a reading."""
    events: Sequence[Event]
    tried: Sequence[Mapping[str, Any]] = ()
    """Knobs of each trial of a search's warm process, which failed at the last one."""
    in_first_step: bool = False
    """True if no step had ended."""

    def explained(self, model_of: Callable[[RunSpec], MemoryModel | None]) -> OomExplanation:
        """The cause, and the changes that would fit: by the traced memory models, or by estimate without one.

        For a search's warm process the knobs are those tried last, and no changes are given: the search goes on.
        """
        # Imported late, here and below: the supervisor starts without the tracer, which only a lack of memory needs.
        from trainfast_runner.memory.oom_explained import explain

        if self.run.script is not None:
            return explain_script(self.run, self.run.script, self.error, self.held_bytes)
        run, is_warm = self.run, self.run.role in WARM_ROLES
        if is_warm and not self.tried:
            phase = self.error.phase if self.error is not None else None
            return OomExplanation(phase=phase, held_bytes=self.held_bytes, basis="no batch was tried yet")
        if is_warm:
            # The prediction in `run.json` is for the preset's knobs.
            run = msgspec.structs.replace(run, knobs={**run.knobs, **self.tried[-1]}, predicted=None)
        explanation = explain(
            run,
            self.error,
            self.reason,
            model_of,
            events=self.events,
            held_bytes=self.held_bytes,
            host_bytes=self.host_bytes,
            in_first_step=self.in_first_step,
        )
        return (
            msgspec.structs.replace(explanation, batch_size=run.knobs["batch_size"], changes=[])
            if is_warm
            else explanation
        )


def out_of_memory_of(records: RunRecords, run: RunFile, reason: str, error: RunError | None) -> OutOfMemory:
    """Gather the records of `run`, which ran out of memory."""
    return OutOfMemory(
        run,
        reason,
        error,
        held_bytes_of(records, error),
        highest(sample.memory_available_bytes for _, sample in records.hosts),
        records.events,
        records.tried,
        in_first_step=run.role not in WARM_ROLES and not any(records.steps.values()),
    )


def explanation_of(records: RunRecords, reason: str, error: RunError | None) -> OomExplanation | None:
    """The cause of this run's lack of memory, without new traces; None without `run.json`."""
    run = records.run
    if run is None:
        return None
    try:
        return out_of_memory_of(records, run, reason, error).explained(models_of(run))
    except Exception as problem:
        # A bug in the explanation must not cost the run its result.
        return OomExplanation(basis=f"could not be explained: {type(problem).__name__}: {problem}")


def held_bytes_of(records: RunRecords, error: RunError | None) -> int | None:
    """The most bytes that the failed rank held in the phase it failed in, as it recorded them."""
    rank = error.rank if error is not None else None
    held_bytes = [line.held_bytes for line in records.worker.get(rank or 0, []) if line.kind == "exception"]
    return held_bytes[-1] if held_bytes else None


def models_of(run: RunFile, python: str | None = None) -> Callable[[RunSpec], MemoryModel | None]:
    """The memory models traced so far for the run's GPU; `python` replaces the one it trained in."""
    from trainfast_runner.memory.tracing import cached_models

    return cached_models(run.device, python or run.python or None, next(iter(run.device_names), None))


def explained_now(directory: Path, result: Result) -> Result:
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

    `python` traces, None for the one that trained. `tracer` is a tracing process to use.

    Yields the number of remaining traces before each. Ends early once `cancelled` is set. Raises UserError when the
    training Python cannot be asked.
    """
    run, error = oom_run.run, oom_run.error
    if run.script is not None:
        return
    spec, phase = spec_of_record(run), error.phase if error is not None else None
    python = python or run.python or None
    try:
        yield from _trace([spec, *candidates(spec, run.device, phase)], run, python, cancelled, tracer)
        if not _is_cured(oom_run, python):
            yield from _trace(combined(spec, run.device, phase), run, python, cancelled, tracer)
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
    explanation = oom_run.explained(models_of(oom_run.run, python))
    return explanation.limit_bytes is None or any(map(is_enough, explanation.changes))

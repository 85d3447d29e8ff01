"""Explain running out of memory. Read in this order:

- OutOfMemory: the run, and its records of the end
- explain_run: the explanation of a preset's run or a script's, with the changes that would fit
- explain_records: the same from the records of an ended run
- trace_changes: traces of the changes whose memory is not known yet
"""

from __future__ import annotations

import dataclasses
import re
import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from trainfast_runner.errors import UserError, highest
from trainfast_runner.machine.training_python import ProgramCancelled
from trainfast_runner.memory.model import Prediction
from trainfast_runner.memory.oom_changes import (
    KEEPS_GLOBAL_BATCH,
    MAX_CHANGES,
    MODEL_PHASE,
    OPTIMIZER_PHASE,
    FitTarget,
    ModelOf,
    Settings,
    best_changes,
    best_of_each_knob,
    beyond_bytes,
    changed_global_batch,
    knob_changes,
    predict_if_traced,
    settings_to_trace,
    spec_with,
    unpredicted_change,
)
from trainfast_runner.records.json_lines import newest
from trainfast_runner.records.result import OomChange, OomExplanation, Result, RunError
from trainfast_runner.records.run_directory import RunRecords, read_records
from trainfast_runner.records.run_file import RunFile, ScriptAsked
from trainfast_runner.records.run_lines import Event
from trainfast_runner.records.worker_lines import WARM_ROLES, ExceptionLine
from trainfast_runner.settings import script_preset
from trainfast_runner.settings.knob_values import tightest_limit_bytes
from trainfast_runner.settings.knobs import defaults
from trainfast_runner.settings.script_preset import ScriptPreset
from trainfast_runner.settings.script_reach import Way, reach_of
from trainfast_runner.settings.spec import RunSpec, spec_of_record
from trainfast_runner.units import mebibytes
from trainfast_runner.worker.shared.memory_limit import limit_of_rank

if TYPE_CHECKING:
    from trainfast_runner.memory.warm_tracer import WarmTracer


GROWING_CATEGORIES = {
    MODEL_PHASE: ("params",),
    "forward": ("activations", "temporary"),
    "backward": ("activations", "grads", "temporary", "communication"),
    OPTIMIZER_PHASE: ("optimizer", "temporary", "communication"),
}
"""Categories that grow in each phase, the usually largest first; the others exist before it."""
BYTES_OF_UNIT = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
SIZE = rf"(\d[\d.]*) ?({'|'.join(BYTES_OF_UNIT)})\b"
"""The pattern of a size in an allocator's message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemory:
    """A run that ran out of memory, and its records of the end."""

    run: RunFile
    reason: str
    error: RunError | None
    held_bytes: int | None = None
    """The most bytes that the failed rank held in the phase it failed in, as it recorded them."""
    host_bytes: int | None = None
    """The most memory that the host had available during the run: it bounds a CPU run without a limit."""
    events: Sequence[Event] = ()
    tried: Sequence[Mapping[str, Any]] = ()
    """Knobs of each trial of a search's warm process, which failed at the last one."""
    in_first_step: bool = False
    """True if no step had ended."""

    @property
    def phase(self) -> str | None:
        """The phase in which memory ran out; None if unknown."""
        return self.error.phase if self.error is not None else None

    @property
    def rank(self) -> int | None:
        """The failed rank; None if unknown."""
        return self.error.rank if self.error is not None else None

    @property
    def message(self) -> str:
        """The allocator's message; empty if unknown."""
        return self.reason or (self.error.message if self.error is not None else None) or ""

    @property
    def asked_bytes(self) -> int | None:
        """Bytes of the request that failed."""
        return asked_and_free(self.message)[0]

    @property
    def limit_bytes(self) -> int | None:
        """The limit, else the most that the rank could have: its share of the host, or by the figures of a GPU's error.

        None if unknown.
        """
        if self.run.memory_limit_bytes:
            return limit_of_rank(self.run.memory_limit_bytes, self.rank or 0)
        if (limit_bytes := tightest_limit_bytes(self.run.knobs)) is not None:
            return limit_bytes
        if self.run.device == "cpu":
            # A shell's own limit counts more than the allocator's bytes.
            is_unknown = self.host_bytes is None or {"RLIMIT_AS", "RLIMIT_DATA"} & set(self.run.limits)
            return None if is_unknown else (self.host_bytes or 0) // self.run.world_size
        free_bytes = asked_and_free(self.message)[1]
        allocated_bytes = _bytes_in(self.message, f"{SIZE} is allocated by PyTorch")
        if free_bytes is None or allocated_bytes is None:
            return None
        reserved_bytes = _bytes_in(self.message, f"{SIZE} is reserved by PyTorch but unallocated")
        return free_bytes + allocated_bytes + (reserved_bytes or 0)


def explain_run(oom_run: OutOfMemory, model_of: ModelOf) -> OomExplanation:
    """Explain why a run ran out of memory, with the changes that would fit: by traced memory models, else by estimate.

    For a search's warm process the knobs are those tried last, and no changes are given: the search goes on.
    """
    run = oom_run.run
    if run.script is not None:
        return _explain_script(oom_run, run.script)
    if run.role not in WARM_ROLES:
        return explain_preset(oom_run, model_of)
    if not oom_run.tried:
        return OomExplanation(phase=oom_run.phase, held_bytes=oom_run.held_bytes, basis="no batch was tried yet")
    # The prediction in `run.json` is for the preset's knobs.
    tried_run = msgspec.structs.replace(run, knobs={**run.knobs, **oom_run.tried[-1]}, predicted=None)
    explanation = explain_preset(dataclasses.replace(oom_run, run=tried_run), model_of)
    return msgspec.structs.replace(explanation, batch_size=tried_run.knobs["batch_size"], changes=[])


def explain_preset(oom_run: OutOfMemory, model_of: ModelOf) -> OomExplanation:
    """Explain why a preset's run ran out of memory, and find changes that would make it fit.

    `model_of` returns the memory model of a spec, None if it is not traced, or raises UserError if there can be none.
    """
    run, phase = oom_run.run, oom_run.phase
    spec = spec_of_record(run)
    limit_bytes = oom_run.limit_bytes
    _, predicted = predict_if_traced(model_of, spec, run.world_size) or (None, None)
    needed_bytes = run.predicted_bytes
    if needed_bytes is None and predicted is not None:
        needed_bytes = predicted.total_bytes
    grown, grown_bytes = _fastest_growing(predicted, phase)
    asked_bytes = oom_run.asked_bytes
    largest_share = limit_bytes / asked_bytes if limit_bytes and asked_bytes else 1.0
    applicable = knob_changes(spec.knobs, run.device, phase, run.compute_capabilities, largest_share)
    if limit_bytes is None:
        changes = [unpredicted_change(change) for change in best_of_each_knob(applicable, phase)[:MAX_CHANGES]]
    else:
        target = FitTarget(
            spec=spec,
            device=run.device,
            ranks=run.world_size,
            limit_bytes=limit_bytes,
            phase=phase,
            model_of=model_of,
            beyond_bytes=beyond_bytes(limit_bytes, predicted, phase, in_first_step=oom_run.in_first_step),
        )
        changes = best_changes(target, applicable)
    return OomExplanation(
        phase=phase,
        rank=oom_run.rank,
        grown=grown,
        grown_bytes=grown_bytes,
        held_bytes=oom_run.held_bytes,
        asked_bytes=asked_bytes,
        needed_bytes=needed_bytes,
        limit_bytes=limit_bytes,
        missing_bytes=_missing_bytes(oom_run, needed_bytes),
        others=list(_other_processes(oom_run)),
        changes=changes,
        basis=predicted.basis if predicted is not None else "",
    )


def _missing_bytes(oom_run: OutOfMemory, needed_bytes: int | None) -> int | None:
    """Bytes missing by the prediction; else the least missing of the last request; None if unknown."""
    limit_bytes, asked_bytes = oom_run.limit_bytes, oom_run.asked_bytes
    if needed_bytes is not None and limit_bytes is not None and needed_bytes > limit_bytes:
        return needed_bytes - limit_bytes
    # Under a limit that was set for the run the GPU's free memory does not matter.
    free_bytes = None if oom_run.run.memory_limit_bytes else asked_and_free(oom_run.message)[1]
    if free_bytes is None and limit_bytes is not None and oom_run.held_bytes is not None:
        free_bytes = limit_bytes - oom_run.held_bytes
    if asked_bytes is None or free_bytes is None or asked_bytes <= free_bytes:
        return None
    return asked_bytes - free_bytes


def _fastest_growing(prediction: Prediction | None, phase: str | None) -> tuple[str | None, int | None]:
    """The category that grows most in this phase, and its bytes at the phase's predicted peak."""
    grows = GROWING_CATEGORIES.get(phase or "")
    if grows is None or prediction is None:
        return (None if grows is None else grows[0]), None
    phase_bytes = prediction.phases.get("optimizer" if phase == OPTIMIZER_PHASE else "forward_backward", {})
    grown = max(grows, key=lambda name: phase_bytes.get(name, 0))
    return grown, phase_bytes.get(grown, 0)


def _other_processes(oom_run: OutOfMemory) -> Iterator[str]:
    """Other processes that held memory of the device: by the error's message, the start of the run, and its events."""
    others = {
        int(pid): f"process {pid} held {size}"
        for pid, size in re.findall(r"Process (\d+) has (\d[\d.]* [KMG]iB) memory in use", oom_run.message)
    }
    for process in oom_run.run.foreign_processes:
        size = "memory" if process.memory_used_bytes is None else mebibytes(process.memory_used_bytes)
        if process.pid is not None:
            others.setdefault(process.pid, f"process {process.pid} held {size} from the start")
    present: dict[tuple[int | None, int | None], Event] = {}
    for event in oom_run.events:
        if event.kind == "foreign_process":
            present[event.device, event.pid] = event
    for event in present.values():
        if event.state == "appeared":
            others.setdefault(event.pid or 0, event.detail or f"process {event.pid} appeared")
    yield from others.values()


def asked_and_free(message: str) -> tuple[int | None, int | None]:
    """Bytes of the request that an allocator's message refuses, and the bytes free then; None where it names none.

    torch writes "... Tried to allocate V. GPU 0 has a total capacity of W of which X is free. ... Of the allocated
    memory Y is allocated by PyTorch, and Z is reserved by PyTorch but unallocated."
    """
    return _bytes_in(message, f"allocate {SIZE}"), _bytes_in(message, f"of which {SIZE}")


def _bytes_in(message: str, pattern: str) -> int | None:
    """The size in bytes that this pattern finds in an allocator's message; None if it finds none."""
    match = re.search(pattern, message)
    return None if match is None else int(float(match[1].rstrip(".")) * BYTES_OF_UNIT[match[2]])


def out_of_memory_of(records: RunRecords, run: RunFile, reason: str, error: RunError | None) -> OutOfMemory:
    """Gather the records of `run`, which ran out of memory."""
    failed_rank = error.rank if error is not None else None
    exception = newest(records.worker_lines.get(failed_rank or 0, []), ExceptionLine)
    return OutOfMemory(
        run=run,
        reason=reason,
        error=error,
        held_bytes=None if exception is None else exception.held_bytes,
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
    if explanation is None or (
        explanation.needed_bytes is None and recorded_oom is not None and recorded_oom.needed_bytes is not None
    ):
        return result
    return msgspec.structs.replace(result, oom=explanation)


EVALUATION_ADVICE = (
    "a smaller evaluation batch (per_device_eval_batch_size of the HF Trainer) makes each forward pass smaller",
    "eval_accumulation_steps moves the predictions to the host's memory every few batches",
    "preprocess_logits_for_metrics keeps only what the metrics need, such as the argmax of the logits",
    "torch.no_grad() around the evaluation keeps no activations; sums instead of lists keep no outputs",
)
"""Changes of a script that free memory in its evaluation: a smaller training batch frees none there."""
NOT_PREDICTED = "the memory of a script of your own is not predicted"


def _explain_script(oom_run: OutOfMemory, script: ScriptAsked) -> OomExplanation:
    """The phase, the memory held and the changes; a search's trial gets no changes, as its search goes on."""
    run, evaluates = oom_run.run, oom_run.phase == "evaluation"
    return OomExplanation(
        phase=oom_run.phase,
        rank=oom_run.rank,
        held_bytes=oom_run.held_bytes,
        asked_bytes=oom_run.asked_bytes,
        limit_bytes=min(run.memory_limit_bytes) if run.memory_limit_bytes else None,
        changes=[] if script.trial or evaluates else _changes_of_script(run, script, oom_run.phase),
        advice=list(EVALUATION_ADVICE) if evaluates else [],
        basis=NOT_PREDICTED,
    )


def _changes_of_script(run: RunFile, script: ScriptAsked, phase: str | None) -> list[OomChange]:
    """The changes of knobs that the run set and that reach the script; the script's own values are not known.

    A knob reaches it by the words of the preset, else those that the run used, or by a framework that is known.
    """
    preset = ScriptPreset(flag_words=script.flag_words or dict.fromkeys(script.flagged, "{}"))
    with suppress(UserError):  # the file may have been edited since, and damaged
        path = script_preset.path_of(run.preset)
        preset = preset if path is None else script_preset.load(path)

    def takes(name: str, value: str) -> bool:
        words = preset.flag_words.get(name)
        by_framework = bool(preset.framework) and reach_of(name, preset).way is Way.FRAMEWORK
        return value in words if isinstance(words, dict) else words is not None or by_framework

    knobs = {**defaults(), **run.knobs}
    applicable = knob_changes(knobs, run.device, phase, run.compute_capabilities)
    changes: list[OomChange] = []
    for knob_change in best_of_each_knob(applicable, phase):
        if knob_change.knob not in run.knobs or not takes(knob_change.knob, knob_change.value):
            continue
        change, kept_by = unpredicted_change(knob_change), knob_change.grad_accum
        if kept_by is not None and "grad_accum" in run.knobs and takes("grad_accum", kept_by):
            change.settings["grad_accum"] = kept_by
            change = msgspec.structs.replace(change, costs=f"little; {KEEPS_GLOBAL_BATCH}")
        elif kept_by is not None:
            costs = changed_global_batch(int(knob_change.value) / run.knobs["batch_size"])
            change = msgspec.structs.replace(change, costs=costs)
        changes.append(change)
    return changes[:MAX_CHANGES]


def trace_changes(
    oom_run: OutOfMemory,
    python: str | None = None,
    cancelled: threading.Event | None = None,
    tracer: WarmTracer | None = None,
) -> Generator[int]:
    """Trace the run's model with each change of a knob, and with all of them together.

    `python` traces, None for the one that trained; `tracer` is a tracing process to use.

    Yields the number of remaining traces before each. Ends early once `cancelled` is set. Raises UserError when the
    training Python cannot be asked.
    """
    # Imported late: the tracer is needed only for a run that ran out of memory.
    from trainfast_runner.memory.tracing import cached_models, trace_models

    run, phase = oom_run.run, oom_run.phase
    if run.script is not None:
        return
    spec = spec_of_record(run)
    python = python or run.python or None
    applicable = knob_changes(spec.knobs, run.device, phase, run.compute_capabilities)
    model_of = cached_models(run.device, python)
    specs = [one for one in _different_specs(spec, settings_to_trace(applicable, phase)) if model_of(one) is None]
    traces = trace_models(specs, run.device, python, cancelled=cancelled, gpus=run.device_uuids, tracer=tracer)
    with suppress(ProgramCancelled):
        if specs:
            yield len(specs)
            yield from (len(specs) - done for done, _ in enumerate(traces, 1) if done < len(specs))


def _different_specs(spec: RunSpec, changes: list[Settings]) -> list[RunSpec]:
    """Return the specs with each of these settings, without refused and equal ones."""
    specs: list[RunSpec] = []
    for settings in changes:
        changed = spec_with(spec, settings)
        if changed is not None and changed not in specs:
            specs.append(changed)
    return specs

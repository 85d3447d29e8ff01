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
from typing import Any

import msgspec

from trainfast_runner.errors import highest
from trainfast_runner.machine.training_python import ProgramCancelled
from trainfast_runner.memory import oom_changes
from trainfast_runner.records.json_lines import newest
from trainfast_runner.records.result import OomChange, OomExplanation, Result, RunError
from trainfast_runner.records.run_directory import RunRecords, read_records
from trainfast_runner.records.run_file import Prediction, RunFile, ScriptAsked
from trainfast_runner.records.run_lines import Event
from trainfast_runner.records.worker_lines import WARM_ROLES, ExceptionLine
from trainfast_runner.settings.knob_values import tightest_limit_bytes
from trainfast_runner.settings.knobs import defaults
from trainfast_runner.settings.spec import RunSpec, spec_of_record
from trainfast_runner.units import mebibytes
from trainfast_runner.worker.shared.memory_limit import limit_of_rank

GROWING_CATEGORIES = {
    oom_changes.MODEL_PHASE: ("params", "frozen", "quantized"),
    "forward": ("activations", "temporary"),
    "backward": ("activations", "grads", "temporary", "communication"),
    oom_changes.OPTIMIZER_PHASE: ("optimizer", "temporary", "communication"),
}
"""Categories that grow in each phase, the usually largest first; the others exist before it."""
BYTES_OF_UNIT = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
SIZE = rf"(\d[\d.]*) ?({'|'.join(BYTES_OF_UNIT)})\b"
"""The pattern of a size in an allocator's message."""
SIZES = {
    "asked": f"allocate {SIZE}",
    "free": f"of which {SIZE}",
    "allocated": f"{SIZE} is allocated by PyTorch",
    "reserved": f"{SIZE} is reserved by PyTorch but unallocated",
}
"""The sizes in torch's message: "Tried to allocate V. GPU 0 has a total capacity of W of which X is free. ... Of the
allocated memory Y is allocated by PyTorch, and Z is reserved by PyTorch but unallocated." """


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemory:
    """A run that ran out of memory, and its records of the end."""

    run: RunFile
    reason: str
    error: RunError
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
    def message(self) -> str:
        """The allocator's message; empty if unknown."""
        return self.reason or self.error.message or ""

    @property
    def limit_bytes(self) -> int | None:
        """The limit, else the most that the rank could have: its share of the host, or by the figures of a GPU's error.

        None if unknown.
        """
        if self.run.memory_limit_bytes:
            return limit_of_rank(self.run.memory_limit_bytes, self.error.rank or 0)
        if (limit_bytes := tightest_limit_bytes(self.run.knobs)) is not None:
            return limit_bytes
        if self.run.device == "cpu":
            # A shell's own limit counts more than the allocator's bytes.
            is_unknown = self.host_bytes is None or {"RLIMIT_AS", "RLIMIT_DATA"} & set(self.run.limits)
            return None if is_unknown else (self.host_bytes or 0) // self.run.world_size
        sizes = sizes_in(self.message)
        if "free" not in sizes or "allocated" not in sizes:
            return None
        return sizes["free"] + sizes["allocated"] + sizes.get("reserved", 0)


def explain_run(oom_run: OutOfMemory, model_of: oom_changes.ModelOf) -> OomExplanation:
    """Explain why a run ran out of memory, with the changes that would fit: by traced memory models, else by estimate.

    `model_of` returns the memory model of a spec, None if it is not traced, or raises UserError if there can be none.
    For a search's warm process the knobs are those tried last, and no changes are given: the search goes on.
    """
    run, phase = oom_run.run, oom_run.error.phase
    if run.script is not None:
        return _explain_script(oom_run, run.script)
    is_trial = run.role in WARM_ROLES
    if is_trial:
        if not oom_run.tried:
            return OomExplanation(phase=phase, held_bytes=oom_run.held_bytes, basis="no batch was tried yet")
        # The prediction in `run.json` is for the preset's knobs.
        run = msgspec.structs.replace(run, knobs={**run.knobs, **oom_run.tried[-1]}, predicted=None)
        oom_run = dataclasses.replace(oom_run, run=run)
    spec = spec_of_record(run)
    _, predicted = oom_changes.predict_if_traced(model_of, spec, run.world_size) or (None, None)
    needed_bytes = run.predicted_bytes
    if needed_bytes is None and predicted is not None:
        needed_bytes = predicted.total_bytes
    grown, grown_bytes = _fastest_growing(predicted, phase)
    return OomExplanation(
        phase=phase,
        rank=oom_run.error.rank,
        grown=grown,
        grown_bytes=grown_bytes,
        held_bytes=oom_run.held_bytes,
        asked_bytes=sizes_in(oom_run.message).get("asked"),
        needed_bytes=needed_bytes,
        limit_bytes=oom_run.limit_bytes,
        missing_bytes=_missing_bytes(oom_run, needed_bytes),
        batch_size=run.knobs["batch_size"] if is_trial else None,
        others=list(_other_processes(oom_run)),
        changes=[] if is_trial else _changes(oom_run, spec, model_of, predicted),
        basis=predicted.basis if predicted is not None else "",
    )


def _changes(
    oom_run: OutOfMemory, spec: RunSpec, model_of: oom_changes.ModelOf, predicted: Prediction | None
) -> list[OomChange]:
    """The changes that fit within the limit, or without one the usual changes."""
    run, phase, limit_bytes = oom_run.run, oom_run.error.phase, oom_run.limit_bytes
    applicable = _changes_of_spec(run, spec, phase)
    first = oom_changes.defragmenting(spec.knobs, run.device, sizes_in(oom_run.message))
    if limit_bytes is None:
        return [*first, *oom_changes.best_of_each_knob(applicable, phase)][: oom_changes.MAX_CHANGES]
    target = oom_changes.FitTarget(
        spec=spec,
        device=run.device,
        ranks=run.world_size,
        limit_bytes=limit_bytes,
        model_of=model_of,
        beyond_bytes=oom_changes.beyond_bytes(limit_bytes, predicted, phase, in_first_step=oom_run.in_first_step),
    )
    return [*first, *oom_changes.best_changes(target, applicable, phase)][: oom_changes.MAX_CHANGES]


def _changes_of_spec(run: RunFile, spec: RunSpec, phase: str | None) -> list[OomChange]:
    """All changes of one knob that free memory in the phase."""
    kind = spec.model.get("family"), spec.data.get("objective")
    return oom_changes.knob_changes(spec.knobs, run.device, phase, run.compute_capabilities, kind)


def _missing_bytes(oom_run: OutOfMemory, needed_bytes: int | None) -> int | None:
    """Bytes missing by the prediction; else the least missing of the last request; None if unknown."""
    limit_bytes, sizes = oom_run.limit_bytes, sizes_in(oom_run.message)
    if needed_bytes is not None and limit_bytes is not None and needed_bytes > limit_bytes:
        return needed_bytes - limit_bytes
    # Under a limit that was set for the run the GPU's free memory does not matter.
    asked_bytes, free_bytes = sizes.get("asked"), None if oom_run.run.memory_limit_bytes else sizes.get("free")
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
    phase_bytes = prediction.phases.get("optimizer" if phase == oom_changes.OPTIMIZER_PHASE else "forward_backward", {})
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
    foreign = [event for event in oom_run.events if event.kind == "foreign_process"]
    for event in {(event.device, event.pid): event for event in foreign}.values():
        if event.state == "appeared":
            others.setdefault(event.pid or 0, event.detail or f"process {event.pid} appeared")
    yield from others.values()


def sizes_in(message: str) -> dict[str, int]:
    """The bytes of each of SIZES that an allocator's message has."""
    matches = {name: re.search(pattern, message) for name, pattern in SIZES.items()}
    return {
        name: int(float(match[1].rstrip(".")) * BYTES_OF_UNIT[match[2]])
        for name, match in matches.items()
        if match is not None
    }


def out_of_memory_of(records: RunRecords, run: RunFile, reason: str, error: RunError | None) -> OutOfMemory:
    """Gather the records of `run`, which ran out of memory."""
    error = error or RunError()
    exception = newest(records.worker_lines.get(error.rank or 0, []), ExceptionLine)
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


def models_of(run: RunFile, python: str | None = None) -> oom_changes.ModelOf:
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
    run, evaluates = oom_run.run, oom_run.error.phase == "evaluation"
    return OomExplanation(
        phase=oom_run.error.phase,
        rank=oom_run.error.rank,
        held_bytes=oom_run.held_bytes,
        asked_bytes=sizes_in(oom_run.message).get("asked"),
        limit_bytes=min(run.memory_limit_bytes) if run.memory_limit_bytes else None,
        changes=[] if script.trial or evaluates else _changes_of_script(run, script, oom_run.error.phase),
        advice=list(EVALUATION_ADVICE) if evaluates else [],
        basis=NOT_PREDICTED,
    )


def _changes_of_script(run: RunFile, script: ScriptAsked, phase: str | None) -> list[OomChange]:
    """The changes of knobs that the run set, and that so reach the script; the script's own values are not known."""

    def takes(name: str, value: str) -> bool:
        words = script.flag_words.get(name)
        # The hooks give a Trainer what no flag takes.
        reaches = name in script.flagged or (bool(script.trainer_fields) and name not in script.unconfirmed)
        return name in run.knobs and reaches and (value in words if isinstance(words, dict) else True)

    knobs = {**defaults(), **run.knobs}
    changes: list[OomChange] = []
    possible = oom_changes.knob_changes(knobs, run.device, phase, run.compute_capabilities)
    for change in oom_changes.best_of_each_knob(possible, phase):
        name = oom_changes.knob_of(change)
        if not takes(name, change.settings[name]):
            continue
        if name == "batch_size":
            batch = int(change.settings[name])
            kept_by = oom_changes.accumulation_that_keeps(knobs, batch)
            if kept_by is not None and takes("grad_accum", str(kept_by)):
                settings = {**change.settings, "grad_accum": str(kept_by)}
                costs = f"little; {oom_changes.KEEPS_GLOBAL_BATCH}"
                change = msgspec.structs.replace(change, settings=settings, costs=costs)
            else:
                costs = oom_changes.changed_global_batch(batch / run.knobs["batch_size"])
                change = msgspec.structs.replace(change, costs=costs)
        changes.append(change)
    return changes[: oom_changes.MAX_CHANGES]


def trace_changes(
    oom_run: OutOfMemory, python: str | None = None, cancelled: threading.Event | None = None
) -> Generator[int]:
    """Trace the run's model with each change of a knob, and with all of them together.

    `python` traces, None for the one that trained.

    Yields the number of remaining traces before each. Ends early once `cancelled` is set. Raises UserError when the
    training Python cannot be asked.
    """
    # Imported late: the tracer is needed only for a run that ran out of memory.
    from trainfast_runner.memory.tracing import cached_models, trace_models

    run, phase = oom_run.run, oom_run.error.phase
    if run.script is not None:
        return
    spec = spec_of_record(run)
    python = python or run.python or None
    model_of = cached_models(run.device, python)
    specs: list[RunSpec] = []
    for settings in oom_changes.settings_to_trace(_changes_of_spec(run, spec, phase), phase):
        changed = oom_changes.spec_with(spec, settings)
        if changed is not None and changed not in specs and model_of(changed) is None:
            specs.append(changed)
    traces = trace_models(specs, run.device, python, cancelled=cancelled, gpus=run.device_uuids)
    with suppress(ProgramCancelled):
        if specs:
            yield len(specs)
            yield from (len(specs) - done for done, _ in enumerate(traces, 1) if done < len(specs))

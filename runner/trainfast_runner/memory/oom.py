"""Explain running out of memory. Read in this order:

- knob_changes: the changes of each knob that may free memory, in words, and the combinations worth a trace
- predicted_changes: those that fit by the memory model, the cheapest first
- explain: the cause, the missing bytes and the changes for a preset's run
- explain_run: an ended run's explanation, of a preset or a script, from its records
- trace_changes: traces of the changes whose memory is not known yet
"""

from __future__ import annotations

import dataclasses
import re
import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from trainfast_runner.errors import UserError, highest
from trainfast_runner.machine.training_python import ProgramCancelled
from trainfast_runner.memory.oom_changes import (
    KEEPS_GLOBAL_BATCH,
    MAX_CHANGES,
    MODEL_PHASE,
    OPTIMIZER_PHASE,
    FitTarget,
    KnobChange,
    ModelOf,
    Settings,
    best_changes,
    best_of_each_knob,
    beyond_bytes,
    changed_global_batch,
    combined_settings,
    is_enough,
    knob_changes_of_run,
    predict_if_traced,
    single_settings,
    spec_with,
    unpredicted_change,
)
from trainfast_runner.memory.prediction import Prediction
from trainfast_runner.records.json_lines import newest
from trainfast_runner.records.result import OomChange, OomExplanation, Result, RunError
from trainfast_runner.records.run_file import RunFile, ScriptAsked
from trainfast_runner.records.run_lines import Event
from trainfast_runner.records.run_records import RunRecords, read_records
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


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemory:
    """A run that ran out of memory, and its records of the end."""

    run: RunFile
    reason: str
    error: RunError | None
    held_bytes: int | None = None
    """Bytes that the failed rank held, as it recorded them."""
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
    def asked_bytes(self) -> float | None:
        """Bytes of the request that failed."""
        return _bytes_after("allocate", self.message)

    @property
    def set_limit_bytes(self) -> int | None:
        """The failed rank's limit by `memory_limit`; None without one."""
        if self.run.memory_limit_bytes:
            return limit_of_rank(self.run.memory_limit_bytes, self.rank or 0)
        return tightest_limit_bytes(self.run.knobs)


def explain_preset(oom_run: OutOfMemory, model_of: ModelOf) -> OomExplanation:
    """Explain why a preset's run ran out of memory, and find changes that would make it fit.

    `model_of` returns the memory model of a spec, None if it is not traced, or raises UserError if there can be none.
    """
    run, phase = oom_run.run, oom_run.phase
    spec = spec_of_record(run)
    limit_bytes = oom_run.set_limit_bytes
    if limit_bytes is None:
        limit_bytes = _allocator_bytes(oom_run)
    _, predicted = predict_if_traced(model_of, spec, run.world_size) or (None, None)
    grown, grown_bytes = _fastest_growing(predicted, phase)
    needed_bytes = run.predicted_bytes
    if needed_bytes is None and predicted is not None:
        needed_bytes = predicted.total_bytes
    return OomExplanation(
        phase=phase,
        rank=oom_run.rank,
        grown=grown,
        grown_bytes=grown_bytes,
        held_bytes=oom_run.held_bytes,
        untouched_bytes=_untouched_bytes(oom_run),
        asked_bytes=asked_and_free(oom_run.message)[0],
        needed_bytes=needed_bytes,
        limit_bytes=limit_bytes,
        missing_bytes=_missing_bytes(oom_run, needed_bytes, limit_bytes),
        others=list(_other_processes(oom_run)),
        changes=_proposed_changes(oom_run, spec, limit_bytes, predicted, model_of),
        basis=predicted.basis if predicted is not None else "",
    )


def _proposed_changes(
    oom_run: OutOfMemory, spec: RunSpec, limit_bytes: int | None, predicted: Prediction | None, model_of: ModelOf
) -> list[OomChange]:
    """Return changes that would make the run fit the limit; without a limit, the best ones without a prediction."""
    run, phase = oom_run.run, oom_run.phase
    if limit_bytes is None:
        applicable = knob_changes_of_run(run, spec.knobs, phase)
        return [unpredicted_change(change) for change in best_of_each_knob(applicable, phase)[:MAX_CHANGES]]
    target = FitTarget(
        spec=spec,
        device=run.device,
        ranks=run.world_size,
        limit_bytes=limit_bytes,
        phase=phase,
        model_of=model_of,
        untouched_bytes=_untouched_bytes(oom_run) or 0,
        beyond_bytes=beyond_bytes(limit_bytes, predicted, phase, in_first_step=oom_run.in_first_step),
        asked_bytes=oom_run.asked_bytes,
        compute_capabilities=tuple(run.compute_capabilities),
    )
    return best_changes(target)


def _allocator_bytes(oom_run: OutOfMemory) -> int | None:
    """The most the failed rank's allocator could have: a rank's share of the host, or the figures of a GPU's error."""
    run, message = oom_run.run, oom_run.message
    if run.device == "cpu":
        if any(name in run.limits for name in ("RLIMIT_AS", "RLIMIT_DATA")):
            return None  # it counts more than the allocator's bytes
        return None if oom_run.host_bytes is None else oom_run.host_bytes // run.world_size
    free_bytes = _free_bytes(message)
    allocated_bytes = _bytes_before("is allocated by PyTorch", message)
    if free_bytes is None or allocated_bytes is None:
        return None
    return int(free_bytes + allocated_bytes + (_bytes_before("is reserved by PyTorch but unallocated", message) or 0))


def _untouched_bytes(oom_run: OutOfMemory) -> int | None:
    """The least that a CPU's limit counted beyond the memory held: address space reserved and not touched.

    RLIMIT_DATA refuses a request that would exceed it, so everything but the request was in use.
    """
    limit_bytes = oom_run.set_limit_bytes
    held_bytes = oom_run.held_bytes
    asked_bytes = oom_run.asked_bytes
    if oom_run.run.device != "cpu" or limit_bytes is None or held_bytes is None or asked_bytes is None:
        return None
    return max(0, int(limit_bytes - held_bytes - asked_bytes))


def _missing_bytes(oom_run: OutOfMemory, needed_bytes: int | None, limit_bytes: int | None) -> int | None:
    """Bytes missing by the prediction; else the least missing of the last request; None if unknown."""
    if needed_bytes is not None and limit_bytes is not None and needed_bytes > limit_bytes:
        return needed_bytes - limit_bytes
    asked_bytes = oom_run.asked_bytes
    # Under a limit that was set for the run the GPU's free memory does not matter.
    free_bytes = None if oom_run.run.memory_limit_bytes else _free_bytes(oom_run.message)
    if free_bytes is None and limit_bytes is not None and oom_run.held_bytes is not None:
        free_bytes = float(limit_bytes - oom_run.held_bytes)
    if asked_bytes is None or free_bytes is None or asked_bytes <= free_bytes:
        return None
    return int(asked_bytes - free_bytes)


def _fastest_growing(prediction: Prediction | None, phase: str | None) -> tuple[str | None, int | None]:
    """The category that grows most in this phase, and its bytes at the phase's predicted peak."""
    grows = GROWING_CATEGORIES.get(phase or "")
    if grows is None:
        return None, None
    if prediction is None:
        return grows[0], None
    phase_bytes = prediction.phases.get("optimizer" if phase == OPTIMIZER_PHASE else "forward_backward", {})
    sizes = {name: phase_bytes.get(name, 0) for name in grows}
    grown = max(sizes, key=lambda name: sizes[name])
    return grown, sizes[grown]


def _other_processes(oom_run: OutOfMemory) -> Iterator[str]:
    """Other processes that held memory of the device: by the error's message, the start of the run, and its events."""
    named_pids: set[int] = set()
    for pid, size, unit in re.findall(r"Process (\d+) has (\d[\d.]*) (KiB|MiB|GiB) memory in use", oom_run.message):
        named_pids.add(int(pid))
        yield f"process {pid} held {size} {unit}"
    for process in oom_run.run.foreign_processes:
        if process.pid is not None and process.pid not in named_pids:
            named_pids.add(process.pid)
            size = "memory" if process.memory_used_bytes is None else mebibytes(process.memory_used_bytes)
            yield f"process {process.pid} held {size} from the start"
    present: dict[tuple[int | None, int | None], Event] = {}
    for event in oom_run.events:
        if event.kind == "foreign_process" and event.state == "appeared":
            present[event.device, event.pid] = event
        elif event.kind == "foreign_process":
            present.pop((event.device, event.pid), None)
    for event in present.values():
        if event.pid not in named_pids:
            yield event.detail or f"process {event.pid} appeared"


def asked_and_free(message: str) -> tuple[int | None, int | None]:
    """Bytes of the request that an allocator's message refuses, and the bytes free then; None where it names none."""
    asked_bytes, free_bytes = _bytes_after("allocate", message), _free_bytes(message)
    return None if asked_bytes is None else int(asked_bytes), None if free_bytes is None else int(free_bytes)


def _free_bytes(message: str) -> float | None:
    """The bytes free on the GPU by torch's message; None if it names none.

    torch writes "... has a total capacity of W of which X is free. ... Of the allocated memory Y is allocated by
    PyTorch, and Z is reserved by PyTorch but unallocated."
    """
    return _bytes_after("of which", message)


def _bytes_after(phrase: str, message: str) -> float | None:
    """The size in bytes after this phrase in an allocator's message; None without the phrase."""
    match = re.search(rf"{phrase} (\d[\d.]*) ?({'|'.join(BYTES_OF_UNIT)})\b", message)
    return None if match is None else float(match[1].rstrip(".")) * BYTES_OF_UNIT[match[2]]


def _bytes_before(phrase: str, message: str) -> float | None:
    match = re.search(rf"(\d[\d.]*) (KiB|MiB|GiB) {phrase}", message)
    return None if match is None else float(match[1]) * BYTES_OF_UNIT[match[2]]


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
        asked_bytes=asked_and_free(oom_run.message)[0],
        limit_bytes=min(run.memory_limit_bytes) if run.memory_limit_bytes else None,
        changes=[] if script.trial or evaluates else _changes(run, script, oom_run.phase),
        advice=list(EVALUATION_ADVICE) if evaluates else [],
        basis=NOT_PREDICTED,
    )


def _changes(run: RunFile, script: ScriptAsked, phase: str | None) -> list[OomChange]:
    """The changes of knobs that the run set and that reach the script; the script's own values are not known."""
    preset = _preset_of(run, script)
    knobs = {**defaults(), **run.knobs}
    applicable = knob_changes_of_run(run, knobs, phase)
    reaching = [
        change for change in best_of_each_knob(applicable, phase) if change.knob in run.knobs and _takes(preset, change)
    ]
    return [_change(change, run, preset) for change in reaching[:MAX_CHANGES]]


def _preset_of(run: RunFile, script: ScriptAsked) -> ScriptPreset:
    """The run's preset if its file is still there, else the flags that the run used."""
    path = script_preset.path_of(run.preset)
    try:
        if path is not None:
            return script_preset.load(path)
    except UserError:
        pass  # edited since, and damaged
    return ScriptPreset(flag_words=script.flag_words or dict.fromkeys(script.flagged, "{}"))


def _takes(preset: ScriptPreset, change: KnobChange) -> bool:
    flag_words = preset.flag_words.get(change.knob)
    if isinstance(flag_words, dict):
        return change.value in flag_words
    return _reaches(change.knob, preset)


def _reaches(name: str, preset: ScriptPreset) -> bool:
    """True if the knob certainly reaches the script: a knob without a flag does by a framework that is known."""
    return name in preset.flag_words or (bool(preset.framework) and reach_of(name, preset).way is Way.FRAMEWORK)


def _change(change: KnobChange, run: RunFile, preset: ScriptPreset) -> OomChange:
    """The change; a smaller batch keeps the global one where accumulation reaches the script too."""
    if change.knob != "batch_size":
        return unpredicted_change(change)
    batch = run.knobs["batch_size"]
    accumulation = run.knobs.get("grad_accum")
    keeps = accumulation is not None and _reaches("grad_accum", preset)
    if not keeps or batch * accumulation % int(change.value):
        costs = changed_global_batch(change.leaves)
        return OomChange(settings={"batch_size": change.value}, saves=change.saves, costs=costs)
    settings = {"batch_size": change.value, "grad_accum": str(batch * accumulation // int(change.value))}
    return OomChange(settings=settings, saves=change.saves, costs=f"little; {KEEPS_GLOBAL_BATCH}")


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
    applicable = knob_changes_of_run(run, spec.knobs, phase)
    try:
        singles = different_specs(spec, single_settings(applicable, phase))
        yield from _trace([spec, *singles], run, python, cancelled, tracer)
        if not _is_cured(oom_run, python):
            shorter = [{change.knob: change.value} for change in applicable if change.knob == "seq_len"]
            others = different_specs(spec, [*combined_settings(applicable), *shorter])
            yield from _trace(others, run, python, cancelled, tracer)
    except ProgramCancelled:
        return


def different_specs(spec: RunSpec, changes: list[Settings]) -> list[RunSpec]:
    """Return the specs with each of these settings, without refused and equal ones."""
    specs: list[RunSpec] = []
    for settings in changes:
        changed = spec_with(spec, settings)
        if changed is not None and changed != spec and changed not in specs:
            specs.append(changed)
    return specs


def _trace(
    specs: list[RunSpec],
    run: RunFile,
    python: str | None,
    cancelled: threading.Event | None,
    tracer: WarmTracer | None,
) -> Generator[int]:
    # Imported late: the tracer is needed only for a run that ran out of memory.
    from trainfast_runner.memory.tracing import cached_models, trace_models

    model_of = cached_models(run.device, python)
    untraced_specs = [spec for spec in specs if model_of(spec) is None]
    if not untraced_specs:
        return
    yield len(untraced_specs)
    traces = trace_models(untraced_specs, run.device, python, cancelled=cancelled, gpus=run.device_uuids, tracer=tracer)
    for done, _ in enumerate(traces, 1):
        if done < len(untraced_specs):
            yield len(untraced_specs) - done


def _is_cured(oom_run: OutOfMemory, python: str | None) -> bool:
    """True if a known change fits, or if there is no limit to fit into."""
    explanation = explain_run(oom_run, models_of(oom_run.run, python))
    return explanation.limit_bytes is None or any(map(is_enough, explanation.changes))

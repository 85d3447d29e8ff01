"""The explanation of a run that ran out of memory, of a preset or a script, by the models traced so far."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec

from trainfast_runner.errors import UserError
from trainfast_runner.known_values import highest
from trainfast_runner.memory.oom.explain import OutOfMemory, asked_and_free, explain_preset
from trainfast_runner.memory.oom.knob_changes import (
    KnobChange,
    best_of_each_knob,
    changed_global_batch,
    knob_changes_of_run,
)
from trainfast_runner.memory.oom.predicted_changes import KEEPS_GLOBAL_BATCH, MAX_CHANGES, ModelOf, unpredicted_change
from trainfast_runner.records.json_lines import newest
from trainfast_runner.records.result import OomChange, OomExplanation, Result, RunError
from trainfast_runner.records.roles import WARM_ROLES
from trainfast_runner.records.run_file import RunFile
from trainfast_runner.records.run_records import RunRecords, read_records
from trainfast_runner.records.script_run import ScriptAsked
from trainfast_runner.records.worker_lines import ExceptionLine
from trainfast_runner.settings.knobs import defaults
from trainfast_runner.settings.scripts import script_preset
from trainfast_runner.settings.scripts.script_preset import ScriptPreset
from trainfast_runner.settings.scripts.script_reach import Way, reach_of


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

"""Explain why a script of the user's own ran out of memory: changes of knobs that reach that script, by estimate."""

from __future__ import annotations

from trainfast_runner.errors import UserError
from trainfast_runner.memory.oom.explain import OutOfMemory, asked_and_free
from trainfast_runner.memory.oom.knob_changes import (
    KnobChange,
    best_of_each_knob,
    changed_global_batch,
    knob_changes_of_run,
)
from trainfast_runner.memory.oom.predicted_changes import KEEPS_GLOBAL_BATCH, MAX_CHANGES, unpredicted_change
from trainfast_runner.records.result import OomChange, OomExplanation
from trainfast_runner.records.run_file import RunFile
from trainfast_runner.records.script_run import ScriptAsked
from trainfast_runner.settings.knobs import defaults
from trainfast_runner.settings.scripts import script_preset
from trainfast_runner.settings.scripts.script_preset import ScriptPreset
from trainfast_runner.settings.scripts.script_reach import Way, reach_of

EVALUATION_ADVICE = (
    "a smaller evaluation batch (per_device_eval_batch_size of the HF Trainer) makes each forward pass smaller",
    "eval_accumulation_steps moves the predictions to the host's memory every few batches",
    "preprocess_logits_for_metrics keeps only what the metrics need, such as the argmax of the logits",
    "torch.no_grad() around the evaluation keeps no activations; sums instead of lists keep no outputs",
)
"""Changes of a script that free memory in its evaluation: a smaller training batch frees none there."""
NOT_PREDICTED = "the memory of a script of your own is not predicted"


def explain_script(oom_run: OutOfMemory, script: ScriptAsked) -> OomExplanation:
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

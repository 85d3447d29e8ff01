"""The survey of a script's preset, and the plan of its best-fit search: every trial is a run by itself in a sandbox.

The knobs that are varied are those whose present value the preset names. Nothing is known of the script's memory before
its first trial, whose step is traced, and nothing of its FLOPs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from trainfast_runner.errors import UserError
from trainfast_runner.machine.cpu.device_names import CPU
from trainfast_runner.machine.devices import Machine, detect_machine
from trainfast_runner.records.script_run import OUR_KNOBS
from trainfast_runner.running.planning import RunPlan
from trainfast_runner.search.best.global_batch import default_global_batch
from trainfast_runner.search.best.question.opening import BestPlan, global_batch_of, question_of
from trainfast_runner.search.best.question.request import BestRequest, check_request
from trainfast_runner.search.best.question.script_memory import with_fitted_memory, with_seen_samples
from trainfast_runner.search.best.question.survey import Survey
from trainfast_runner.search.best.question.varied import vary_of
from trainfast_runner.search.best.step_rule import LEAST_TIMED_STEPS, UNTIMED
from trainfast_runner.search.candidate_spec import BATCH_KNOBS
from trainfast_runner.search.cool_down import check_coolable
from trainfast_runner.search.journal.best import UNNAMED, BestLine, BestQuestion, Candidate, Space, Trial
from trainfast_runner.search.limits import limits_of
from trainfast_runner.search.options import SearchOptions
from trainfast_runner.search.script_runs import TrialPlan, trial_plan_of, with_trace
from trainfast_runner.settings.knob_type import KnobValues
from trainfast_runner.settings.knob_values import KnobValue
from trainfast_runner.settings.knobs import BY_NAME, defaults, knob
from trainfast_runner.settings.script_preset import ScriptPreset
from trainfast_runner.settings.script_reach import FRAMEWORK_KNOBS, check_reach
from trainfast_runner.settings.set_by_searches import SET_BY_A_SEARCH
from trainfast_runner.settings.spec import RunSpec


class ScriptSurvey(Survey):
    """The survey of a script. Its `spec` has the defaults of knobs that the preset does not name."""

    def __init__(self, preset: ScriptPreset, plan: RunPlan, machine: Machine, trial_plan: TrialPlan) -> None:
        named = {name: value for name, value in plan.spec.knobs.items() if name not in OUR_KNOBS}
        # The ranks of a script's launcher share its global batch as those of ddp do.
        ranks: KnobValues = {"strategy": "single", "devices": None}
        if plan.world_size > 1:
            devices: KnobValue = plan.world_size if plan.device != CPU else f"{CPU}:{plan.world_size}"
            ranks = {"strategy": "ddp", "devices": devices}
        super().__init__(replace(plan.spec, knobs={**defaults(), **named, **ranks}), plan, machine)
        self.named = tuple(named)
        """The knobs whose present value the preset or a setting names."""
        self._preset, self._trial_plan = preset, trial_plan

    def refuse(self, spec: RunSpec) -> UserError | None:
        """Return the error of a value that the mapping has no words for, or that nothing can show; None otherwise."""
        places = self._preset.places
        if spec.knobs["precision"] == "tf32" and "precision" not in places:
            return UserError("nothing in a script shows that tf32 ran", key="precision")
        try:
            self._preset.applied(list(self._preset.command), {name: spec.knobs[name] for name in self.named})
        except UserError as error:
            return error
        return None

    def plan_of(
        self, question: BestQuestion, candidate: Candidate, *, under_memory_limit: bool = False, **knobs: KnobValue
    ) -> RunPlan:
        """Return the plan of a candidate's trial, which is always under the search's limit. Raises UserError."""
        plan = self._trial_plan({**candidate.knobs, **knobs})
        return replace(plan, memory_limit_bytes=tuple(question.limits_bytes) or None)

    def space(self, question: BestQuestion) -> Space:
        """Return the candidates, each in a process of its own. Raises UserError as `enumerate_space`."""
        space = super().space(question)
        alone = [
            msgspec.structs.replace(candidate, process_knobs=dict(candidate.knobs)) for candidate in space.candidates
        ]
        return msgspec.structs.replace(space, candidates=alone)

    def trial_of(self, plan: RunPlan, space: Space, number: int, lines: Sequence[BestLine]) -> RunPlan:
        """Return the plan with a trace of its step, unless the memory of this candidate is known by now."""
        candidate = space.candidates[number]
        is_tried = any(isinstance(line, Trial) and line.candidate_number == number for line in lines)
        is_known = candidate.predicted_bytes is not None or "batch_size" not in candidate.knobs
        return plan if is_tried or is_known else with_trace(plan)

    def predict_from_trials(self, question: BestQuestion, space: Space, lines: Sequence[BestLine]) -> Space:
        """Return the candidates with the samples of a step that the first trial saw, and memory by the trials."""
        trials = [line for line in lines if isinstance(line, Trial) and line.outcome == "measured"]
        if not trials:
            return space
        limit = min(question.limits_bytes, default=None)
        return with_fitted_memory(with_seen_samples(space, trials[0]), trials, limit, self.plan.device)


def plan_script_best(
    preset: ScriptPreset,
    settings: Sequence[str],
    request: BestRequest,
    options: SearchOptions,
    python: str | None = None,
) -> BestPlan:
    """Check a question about a script against this machine. Raises UserError; starts nothing.

    Without a global batch the preset's own is kept, so that the training stays the same, unless the batch is varied.
    """
    trial_plan = trial_plan_of(preset, settings, python, SET_BY_A_SEARCH)
    plan = trial_plan({"steps": UNTIMED + LEAST_TIMED_STEPS, "timing_warmup": UNTIMED})
    check_request(request, plan)
    check_coolable(plan, options.cool_to_c)
    machine = detect_machine(plan.versions, plan.python or None).used_by(plan.spec.knobs.get("devices"))
    survey = ScriptSurvey(preset, plan, machine, trial_plan)
    _check_answerable(request, survey.named, preset)
    preset_batch = default_global_batch(survey.spec, machine)
    has_batch = all(name in survey.named for name in BATCH_KNOBS)
    entries = [BY_NAME[name] for name in survey.named if has_batch or name not in BATCH_KNOBS]
    batch = request.global_batch or preset_batch
    vary, left_alone = vary_of(survey.spec, request.vary, machine, batch, survey.refuse, entries)
    if not request.vary:
        left_alone |= _unnamed_knobs(preset, survey.named, has_batch)
    if not vary:
        raise UserError(
            f"{preset.name} names the present value of no knob that keeps its training the same",
            key="--vary",
            advice=f"trainfast-tui search best {preset.name} --set batch_size=8 --vary batch_size=4,8,16",
        )
    question = question_of(
        plan.spec,
        plan,
        request,
        vary=vary,
        left_alone=left_alone,
        global_batch=global_batch_of(request, preset_batch) if has_batch else None,
        limits_bytes=list(limits_of(plan).by_rank),
        limits_trials=True,
    )
    return BestPlan(question, plan, survey, survey.space(question))


def _check_answerable(request: BestRequest, named: Sequence[str], preset: ScriptPreset) -> None:
    """Raise UserError for a question that a script's trials cannot answer."""
    if request.objective == "tokens_per_s":
        raise UserError(
            "--objective tokens_per_s: no hook sees how many tokens a script's sample has",
            key="--objective",
            nearest="samples_per_s",
        )
    needed = (*request.vary, *(BATCH_KNOBS if request.global_batch is not None else ()))
    for name in (name for name in needed if name not in named):
        if name not in preset.places:
            takes = (*FRAMEWORK_KNOBS, *preset.places)
            if knob(name).name not in takes:
                raise UserError(f"{name} has no place in {preset.name}: name its flag", key=name, allowed=takes)
            check_reach([name], preset.framework, None)
        raise UserError(
            f"{preset.name} does not name the present {name} of its script", key=name, advice=f"--set {name}=VALUE"
        )


def _unnamed_knobs(preset: ScriptPreset, named: Sequence[str], has_batch: bool) -> dict[str, str]:
    """The mapped knobs that are left alone because a present value is missing, each with the reason."""
    unnamed = {name: UNNAMED for name in preset.places if name not in named and BY_NAME[name].search_values}
    if not has_batch:
        others = {"batch_size": "grad_accum", "grad_accum": "batch_size"}
        unnamed |= {
            name: f"without a named {other} another value changes the global batch"
            for name, other in others.items()
            if name in named
        }
    return unnamed

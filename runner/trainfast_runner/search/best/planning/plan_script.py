"""Plan a best-fit search of a script, which varies the knobs whose present value the preset names."""

from __future__ import annotations

from collections.abc import Sequence

from trainfast_runner.errors import UserError
from trainfast_runner.machine.devices import detect_machine
from trainfast_runner.search.best.global_batch import default_global_batch
from trainfast_runner.search.best.planning.best_plan import BestPlan, global_batch_of, question_of
from trainfast_runner.search.best.planning.request import BestRequest, check_request
from trainfast_runner.search.best.planning.varied import vary_of
from trainfast_runner.search.best.step_rule import MIN_TRIAL_STEPS, UNTIMED_TRIAL_STEPS
from trainfast_runner.search.best.survey.script_survey import ScriptSurvey
from trainfast_runner.search.candidate_spec import BATCH_KNOBS
from trainfast_runner.search.journal.best import UNNAMED_REASON
from trainfast_runner.search.memory.limits import limits_of
from trainfast_runner.search.options import SearchOptions
from trainfast_runner.search.script_runs import script_planner
from trainfast_runner.settings.knobs import KNOBS_BY_NAME, knob
from trainfast_runner.settings.scripts.script_preset import ScriptPreset
from trainfast_runner.settings.scripts.script_reach import FRAMEWORK_KNOBS, check_reach
from trainfast_runner.settings.set_by_searches import SET_BY_A_SEARCH


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
    plan_script_run = script_planner(preset, settings, python, SET_BY_A_SEARCH)
    plan = plan_script_run({"steps": MIN_TRIAL_STEPS, "timing_warmup": UNTIMED_TRIAL_STEPS})
    check_request(request, plan)
    machine = detect_machine(plan.versions, plan.python or None).used_by(plan.spec.knobs.get("devices"))
    survey = ScriptSurvey(preset, plan, machine, plan_script_run)
    _check_answerable(request, survey.named, preset)
    preset_batch = default_global_batch(survey.spec, machine)
    has_batch = all(name in survey.named for name in BATCH_KNOBS)
    entries = [KNOBS_BY_NAME[name] for name in survey.named if has_batch or name not in BATCH_KNOBS]
    batch = request.global_batch or preset_batch
    vary, left_alone = vary_of(survey.spec, request.vary, machine, batch, survey.refuse, entries)
    if not request.vary:
        left_alone |= _unnamed_knobs(preset, survey.named, has_batch=has_batch)
    if not vary:
        raise UserError(
            f"{preset.name} names the present value of no knob that keeps its training the same",
            key="--vary",
            option=f"trainfast-tui search best {preset.name} --set batch_size=8 --vary batch_size=4,8,16",
        )
    question = question_of(
        plan.spec,
        plan,
        request,
        vary=vary,
        left_alone=left_alone,
        global_batch=global_batch_of(request, preset_batch) if has_batch else None,
        limits_bytes=list(limits_of(plan).by_rank),
    )
    return BestPlan(question, survey, survey.space(question))


def _check_answerable(request: BestRequest, named_knobs: Sequence[str], preset: ScriptPreset) -> None:
    """Raise UserError for a question that a script's trials cannot answer."""
    if request.objective == "tokens_per_s":
        raise UserError(
            "--objective tokens_per_s: no hook sees how many tokens a script's sample has",
            key="--objective",
            nearest="samples_per_s",
        )
    needed_knobs = (*request.vary, *(BATCH_KNOBS if request.global_batch is not None else ()))
    for name in (name for name in needed_knobs if name not in named_knobs):
        if name not in preset.flag_words:
            takes = (*FRAMEWORK_KNOBS, *preset.flag_words)
            if knob(name).name not in takes:
                raise UserError(f"{name} has no place in {preset.name}: name its flag", key=name, allowed=takes)
            check_reach({name: None}, preset.framework, None)
        raise UserError(
            f"{preset.name} does not name the present {name} of its script",
            key=name,
            advice=f"naming a value of {name}",
            option=f"--set {name}=VALUE",
        )


def _unnamed_knobs(preset: ScriptPreset, named_knobs: Sequence[str], *, has_batch: bool) -> dict[str, str]:
    """Return the mapped knobs that are left alone because a present value is missing, with the reasons."""
    reasons = {
        name: UNNAMED_REASON
        for name in preset.flag_words
        if name not in named_knobs and KNOBS_BY_NAME[name].search_values
    }
    if not has_batch:
        other_knob = {"batch_size": "grad_accum", "grad_accum": "batch_size"}
        reasons |= {
            name: f"without a named {other} another value changes the global batch"
            for name, other in other_knob.items()
            if name in named_knobs
        }
    return reasons

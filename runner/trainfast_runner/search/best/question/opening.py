"""Open a best-fit search: its question checked against this machine, an unfinished search or a new one."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from trainfast_runner.records.home import Home
from trainfast_runner.records.run_file import ClockAnchor
from trainfast_runner.running import planning
from trainfast_runner.running.planning import RunPlan
from trainfast_runner.search.best.global_batch import default_global_batch
from trainfast_runner.search.best.question.baseline_cost import check_budget
from trainfast_runner.search.best.question.earlier_effects import earlier_effects
from trainfast_runner.search.best.question.request import BestRequest, check_request
from trainfast_runner.search.best.question.survey import ModelSurvey, Survey
from trainfast_runner.search.best.question.varied import vary_of
from trainfast_runner.search.candidate_spec import BATCH_KNOBS, MESH, candidate_spec
from trainfast_runner.search.cool_down import check_coolable
from trainfast_runner.search.journal.best import BestQuestion, Space, read_best_journal
from trainfast_runner.search.journal.lines import SearchJournal
from trainfast_runner.search.options import SearchOptions
from trainfast_runner.search.question_key import key_of_question
from trainfast_runner.search.searches import new_search, unfinished
from trainfast_runner.settings.device_counts import chosen_gpus, device_count
from trainfast_runner.settings.set_by_searches import SET_BY_A_SEARCH
from trainfast_runner.settings.spec import RunSpec, expand_paths


@dataclass(frozen=True)
class BestPlan:
    """A question that this machine can answer: the plan of the preset's own run, and the candidates unpredicted."""

    question: BestQuestion
    plan: RunPlan
    survey: Survey
    space: Space


def plan_best(spec: RunSpec, request: BestRequest, options: SearchOptions, python: str | None = None) -> BestPlan:
    """Check a question against this machine and the training Python. Raises UserError; starts nothing.

    Without a global batch the preset's own is kept, so that the training stays the same, unless the batch is varied.
    """
    spec = replace(spec, data=expand_paths(spec.data))
    # `devices` is a ceiling: the preset's own run may use fewer.
    plan = planning.plan_run(candidate_spec(spec, {}), python)
    check_request(request, plan)
    check_coolable(plan, options.cool_to_c)
    survey = ModelSurvey(spec, plan)
    preset_batch = default_global_batch(spec, survey.machine)
    vary, left_alone = vary_of(spec, request.vary, survey.machine, request.global_batch or preset_batch, survey.refuse)
    question = question_of(
        spec,
        plan,
        request,
        vary=vary,
        left_alone=left_alone,
        global_batch=global_batch_of(request, preset_batch),
        limits_bytes=list(plan.memory_limit_bytes or ()),
    )
    space = survey.space(question)
    uuids = _gpus_of(survey, space)
    if uuids:
        baseline_spec = candidate_spec(spec, {})
        plan = planning.plan_run(baseline_spec, python, uuids[: device_count(baseline_spec, survey.machine)])
        survey = ModelSurvey(spec, plan)
        question = msgspec.structs.replace(question, device_uuids=uuids, device_names=plan.device_names)
    return BestPlan(question, plan, survey, space)


def global_batch_of(request: BestRequest, preset_batch: int) -> int | None:
    """Samples of an optimizer step of every candidate: as requested, else `preset_batch`; None where free."""
    is_free = request.global_batch is None and any(name in request.vary for name in BATCH_KNOBS)
    return None if is_free else request.global_batch or preset_batch


def question_of(spec: RunSpec, plan: RunPlan, request: BestRequest, **fields: Any) -> BestQuestion:
    """The first line of a search's journal, without its id and key; `fields` are further ones of the line."""
    return BestQuestion(
        search_id="",
        key="",
        **spec.record_fields(),
        objective=request.objective,
        for_steps=request.for_steps,
        budget_s=request.budget_s,
        device=plan.device,
        device_names=plan.device_names,
        clock=ClockAnchor(monotonic_ns=time.monotonic_ns(), wall_ns=time.time_ns()),
        **fields,
    )


def _gpus_of(survey: Survey, space: Space) -> list[str]:
    """UUIDs of the GPUs of the candidate that uses most, for the whole search; empty on a CPU."""
    if survey.machine.device != "cuda":
        return []
    specs = [candidate_spec(survey.spec, {}), *survey.legal_specs(space).values()]
    meshes = {tuple(spec.knobs[name] for name in MESH): spec for spec in specs}
    widest = max(meshes.values(), key=lambda spec: device_count(spec, survey.machine))
    return [gpu.uuid for gpu in chosen_gpus(widest.knobs, survey.machine).gpus if gpu.uuid]


def open_best(best_plan: BestPlan, home: Home, options: SearchOptions) -> Path:
    """Return the directory of the search this question continues, or of a new one with its first line written.

    Raises UserError when the budget of a new one does not pay for the baseline, as far as earlier runs tell.
    """
    home.create()
    key = best_key(best_plan)
    unfinished_search = find_unfinished(best_plan, home, options)
    if unfinished_search is not None:
        return unfinished_search
    check_new_budget(best_plan, home)
    directory = new_search(home, best_plan.question.name)
    journal = SearchJournal(directory)
    # Scripts have no model by which their searches would be alike.
    unlike = options.fresh or best_plan.plan.script is not None
    earlier = [] if unlike else earlier_effects(home, best_plan.question, before=directory)
    journal.write(msgspec.structs.replace(best_plan.question, search_id=directory.name, key=key, earlier=earlier))
    journal.close()
    return directory


def find_unfinished(best_plan: BestPlan, home: Home, options: SearchOptions) -> Path | None:
    """Return the directory of the unfinished search that this question continues; None for a new search."""
    return None if options.fresh else unfinished(home, best_key(best_plan), read_best_journal)


def check_new_budget(best_plan: BestPlan, home: Home) -> None:
    """Raise UserError when the budget does not pay for the baseline, as far as earlier runs tell."""
    baseline = best_plan.space.candidates[best_plan.space.baseline_number]
    # As in a trial, which runs without the limit.
    baseline_spec = candidate_spec(best_plan.survey.spec, baseline.knobs).with_overrides(memory_limit=None)
    check_budget(
        best_plan.question.budget_s, replace(best_plan.plan, spec=baseline_spec), baseline.samples_per_step, home
    )


def best_key(best_plan: BestPlan) -> str:
    """Return the key that tells questions apart: of model, data, knobs, varied values, devices and versions.

    Any visible GPU may be the search's: which ones were the freest at its beginning is in its journal.
    """
    question, plan = best_plan.question, best_plan.plan
    visible = [gpu.uuid for gpu in best_plan.survey.machine.gpus]
    knobs = {name: value for name, value in question.knobs.items() if name not in SET_BY_A_SEARCH}
    varied = question.vary, question.global_batch, question.objective, question.for_steps, question.budget_s
    request = (question.model, question.data, knobs, varied, plan.device, visible, plan.python, plan.versions)
    return key_of_question(request, plan)

"""Open a best-fit search: an unfinished one of the same question, or a new one."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec

from trainfast_runner.records.home import Home
from trainfast_runner.running.planning import RunPlan
from trainfast_runner.search.best.planning.baseline_cost import check_budget
from trainfast_runner.search.best.planning.best_plan import BestPlan
from trainfast_runner.search.best.planning.earlier_effects import earlier_effects
from trainfast_runner.search.candidate_spec import candidate_spec
from trainfast_runner.search.journal.lines import JournalWriter
from trainfast_runner.search.options import SearchOptions
from trainfast_runner.search.question_key import key_of_question
from trainfast_runner.search.searches import BEST_KIND, new_search, unfinished
from trainfast_runner.settings.set_by_searches import SET_BY_A_SEARCH


def open_best(best_plan: BestPlan, home: Home, options: SearchOptions) -> Path:
    """Return the directory of the search this question continues, or of a new one with its first line written.

    Raises UserError if the budget of a new search does not pay for the baseline by the figures of earlier runs.
    """
    home.create()
    key = best_key(best_plan)
    unfinished_search = find_unfinished(best_plan, home, options)
    if unfinished_search is not None:
        return unfinished_search
    check_new_budget(best_plan, home)
    directory = new_search(home, best_plan.question.name)
    journal = JournalWriter(directory)
    # A script has no model by which its searches could be compared.
    ignores_earlier = options.fresh or best_plan.plan.script is not None
    earlier = [] if ignores_earlier else earlier_effects(home, best_plan.question, own_directory=directory)
    journal.write(msgspec.structs.replace(best_plan.question, search_id=directory.name, key=key, earlier=earlier))
    journal.close()
    return directory


def find_unfinished(best_plan: BestPlan, home: Home, options: SearchOptions) -> Path | None:
    """Return the directory of the unfinished search that this question continues; None for a new search."""
    return None if options.fresh else unfinished(home, best_key(best_plan), BEST_KIND)


def check_new_budget(best_plan: BestPlan, home: Home) -> None:
    """Raise UserError if the budget does not pay for the baseline by the figures of earlier runs."""
    plan, samples_per_step = baseline_trial(best_plan)
    check_budget(best_plan.question.budget_s, plan, samples_per_step, home)


def baseline_trial(best_plan: BestPlan) -> tuple[RunPlan, int]:
    """Return the plan of the baseline's trial, which runs without `memory_limit`, and the samples of its step."""
    baseline = best_plan.space.candidates[best_plan.space.baseline_number]
    baseline_spec = candidate_spec(best_plan.survey.spec, baseline.knobs).with_overrides(memory_limit=None)
    return dataclasses.replace(best_plan.plan, spec=baseline_spec), baseline.samples_per_step


def best_key(best_plan: BestPlan) -> str:
    """Return the key of a question: of model, data, knobs, varied values, devices and versions.

    All visible GPUs are in the key; the journal has those that the search took, the freest at its beginning.
    """
    question, plan = best_plan.question, best_plan.plan
    visible = [gpu.uuid for gpu in best_plan.survey.machine.gpus]
    knobs = {name: value for name, value in question.knobs.items() if name not in SET_BY_A_SEARCH}
    search_fields = question.vary, question.global_batch, question.objective, question.for_steps, question.budget_s
    request = (question.model, question.data, knobs, search_fields, plan.device, visible, plan.python, plan.versions)
    return key_of_question(request, plan)

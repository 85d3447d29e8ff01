"""The question of a batch search about a script, checked against this machine."""

from __future__ import annotations

from collections.abc import Sequence

from trainfast_runner.search.batch.batch_plan import BatchPlan
from trainfast_runner.search.batch.preset_question import check_options
from trainfast_runner.search.conducting.script_runs import script_planner
from trainfast_runner.search.options import BatchSearchOptions
from trainfast_runner.settings.scripts.script_preset import ScriptPreset
from trainfast_runner.settings.set_by_searches import SET_BY_A_BATCH_SEARCH

SCRIPT_PROBE_STEPS = 4
"""Steps of a probe: the optimizer's states exist from the second on, two later ones are timed."""
UNTIMED_SCRIPT_STEPS = 2


def plan_script_batch(
    preset: ScriptPreset, settings: Sequence[str], python: str | None, options: BatchSearchOptions
) -> BatchPlan:
    """Return the checked plan of a script's batch search. Raises UserError."""
    plan_script_run = script_planner(preset, settings, python, SET_BY_A_BATCH_SEARCH)
    plan = plan_script_run({"steps": SCRIPT_PROBE_STEPS, "timing_warmup": UNTIMED_SCRIPT_STEPS})
    check_options(plan, options)
    return BatchPlan(plan, plan_script_run)

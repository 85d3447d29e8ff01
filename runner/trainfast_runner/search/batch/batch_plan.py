"""The plan of a batch search of a preset or of a user's own script, checked against this machine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from trainfast_runner.errors import UserError
from trainfast_runner.running import planning
from trainfast_runner.running.planning import RunPlan
from trainfast_runner.search.memory.limits import free_gpu_bytes, limit_unknown_error
from trainfast_runner.search.options import BatchSearchOptions
from trainfast_runner.search.script_runs import ScriptPlanner, script_planner
from trainfast_runner.settings.scripts.script_preset import ScriptPreset
from trainfast_runner.settings.set_by_searches import SET_BY_A_BATCH_SEARCH
from trainfast_runner.settings.spec import RunSpec
from trainfast_runner.settings.strategy_of_run import strategy_of
from trainfast_runner.settings.typed_settings import settings_of
from trainfast_runner.worker.catalog import STRATEGIES, nearest_strategy
from trainfast_runner.worker.shared.malloc_thresholds import malloc_settings

SCRIPT_PROBE_STEPS = 4
"""Steps of a script's probe: the optimizer's states exist from the second on, two later ones are timed."""
UNTIMED_SCRIPT_STEPS = 2
"""Steps of a script's probe before the timed ones."""


@dataclass(frozen=True)
class BatchPlan:
    """A checked batch search: the plan of its runs, and the planner of a script's probes."""

    plan: RunPlan
    plan_script_run: ScriptPlanner | None = None
    """Plans the probes of a script; None for a preset."""


def plan_spec_batch(spec: RunSpec, python: str | None, options: BatchSearchOptions) -> BatchPlan:
    """Return the checked plan of a batch search of a preset or a script. Raises UserError."""
    if spec.script is None:
        return plan_preset_batch(spec, python, options)
    return plan_script_batch(spec.script, settings_of(spec.knobs, spec.overrides), python, options)


def plan_preset_batch(spec: RunSpec, python: str | None, options: BatchSearchOptions) -> BatchPlan:
    """Return the checked plan of a preset's batch search. Raises UserError."""
    plan = planning.plan_run(spec, python)
    _check_preset_plan(plan, options)
    return BatchPlan(plan)


def plan_script_batch(
    preset: ScriptPreset, settings: Sequence[str], python: str | None, options: BatchSearchOptions
) -> BatchPlan:
    """Return the checked plan of a script's batch search. Raises UserError."""
    plan_script_run = script_planner(preset, settings, python, SET_BY_A_BATCH_SEARCH)
    plan = plan_script_run({"steps": SCRIPT_PROBE_STEPS, "timing_warmup": UNTIMED_SCRIPT_STEPS})
    _check_options(plan, options)
    if plan.device == "cuda" and plan.memory_limit_bytes is None and free_gpu_bytes(plan) is None:
        raise limit_unknown_error()
    return BatchPlan(plan, plan_script_run)


def _check_preset_plan(plan: RunPlan, options: BatchSearchOptions) -> None:
    """Raise UserError for a preset's plan or options with which sizes cannot be tried."""
    knobs = plan.spec.knobs
    strategy = strategy_of(knobs)
    if not strategy.batch_searchable:
        raise UserError(
            f"search max-batch cannot try batch sizes with strategy={strategy.name}",
            key="strategy",
            allowed=[name for name, entry in STRATEGIES.items() if entry.batch_searchable],
            nearest=nearest_strategy(strategy, lambda entry: entry.batch_searchable),
        )
    if knobs["engine"] != "native":
        raise UserError(
            f"search max-batch tries sizes with engine=native, not engine={knobs['engine']}",
            key="engine",
            allowed=["native"],
            nearest="native",
        )
    malloc_names = malloc_settings(os.environ) if plan.device == "cpu" else []
    if malloc_names:
        raise UserError(
            f"{', '.join(malloc_names)}: a batch search on the CPU measures memory by malloc thresholds of its own",
            key=malloc_names[0],
            advice=f"env -u {' -u '.join(malloc_names)} trainfast-tui search ...",
        )
    _check_options(plan, options)


def _check_options(plan: RunPlan, options: BatchSearchOptions) -> None:
    """Raise UserError for a confirmation run that is too short."""
    if options.confirmation_steps < 2:
        raise UserError(f"--proof-steps {options.confirmation_steps}: at least 2", key="--proof-steps")

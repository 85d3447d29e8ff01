"""The question of a batch search about a preset, checked against this machine."""

from __future__ import annotations

import os

from trainfast_runner.errors import UserError
from trainfast_runner.running import planning
from trainfast_runner.running.planning import RunPlan
from trainfast_runner.search.batch.batch_plan import BatchPlan
from trainfast_runner.search.conducting.cool_down import check_coolable
from trainfast_runner.search.options import BatchSearchOptions
from trainfast_runner.settings.spec import RunSpec
from trainfast_runner.settings.strategy_of_run import strategy_of
from trainfast_runner.worker.catalog import STRATEGIES, nearest_strategy
from trainfast_runner.worker.shared.malloc_thresholds import malloc_settings


def plan_preset_batch(spec: RunSpec, python: str | None, options: BatchSearchOptions) -> BatchPlan:
    """Return the checked plan of a preset's batch search. Raises UserError."""
    plan = planning.plan_run(spec, python)
    _check_plan(plan, options)
    return BatchPlan(plan)


def _check_plan(plan: RunPlan, options: BatchSearchOptions) -> None:
    """Raise UserError for a plan that cannot be searched."""
    knobs = plan.spec.knobs
    strategy = strategy_of(knobs)
    if not strategy.batch_searchable:
        raise UserError(
            f"search max-batch does not change the batch of strategy={strategy.name} while it runs",
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
    check_options(plan, options)


def check_options(plan: RunPlan, options: BatchSearchOptions) -> None:
    """Raise UserError for options that no search has."""
    if options.confirmation_steps < 2:
        raise UserError(f"--proof-steps {options.confirmation_steps}: at least 2", key="--proof-steps")
    check_coolable(plan, options.cool_to_c)

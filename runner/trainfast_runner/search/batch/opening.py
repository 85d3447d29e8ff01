"""Plan the batch search of a preset, and open a search: an unfinished one, or a new one."""

from __future__ import annotations

import os
import time
from pathlib import Path

from trainfast_runner.errors import UserError
from trainfast_runner.memory.available import read_host_free_bytes
from trainfast_runner.records.home import Home
from trainfast_runner.records.run_file import ClockAnchor
from trainfast_runner.records.search_directories import is_conducted
from trainfast_runner.running import planning
from trainfast_runner.running.planning import RunPlan
from trainfast_runner.search.cool_down import check_coolable
from trainfast_runner.search.journal.batch import BatchQuestion, read_batch_journal
from trainfast_runner.search.journal.lines import SearchJournal
from trainfast_runner.search.limits import limits_of
from trainfast_runner.search.options import BatchSearchOptions
from trainfast_runner.search.question_key import key_of_question
from trainfast_runner.search.searches import new_search, unfinished
from trainfast_runner.settings.set_by_searches import SET_BY_A_BATCH_SEARCH
from trainfast_runner.settings.spec import RunSpec
from trainfast_runner.settings.strategies import strategy_of
from trainfast_runner.worker.catalog import STRATEGIES, nearest_strategy
from trainfast_runner.worker.shared.malloc_thresholds import malloc_settings


def plan_preset_batch(spec: RunSpec, python: str | None, options: BatchSearchOptions) -> RunPlan:
    """Return the plan of a preset's batch search, checked. Raises UserError."""
    plan = planning.plan_run(spec, python)
    _check_plan(plan, options)
    return plan


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


def open_batch(plan: RunPlan, home: Home, options: BatchSearchOptions) -> Path:
    """Return the directory of the search this plan continues, or of a new one with its first line written."""
    home.create()
    key = batch_key(plan)
    earlier = None if options.fresh else unfinished(home, key)
    # The processes of a search that is conducted hold part of the memory it began with.
    if earlier is not None and (is_conducted(earlier) or _limits_still_fit(plan, earlier)):
        return earlier
    directory = new_search(home, plan.spec.name)
    spec = plan.spec
    limits = limits_of(plan)
    journal = SearchJournal(directory)
    journal.write(
        BatchQuestion(
            search_id=directory.name,
            key=key,
            **spec.record_fields(),
            device=plan.device,
            world_size=plan.world_size,
            limits_bytes=list(limits.by_rank),
            limit_words=limits.words,
            clock=ClockAnchor(monotonic_ns=time.monotonic_ns(), wall_ns=time.time_ns()),
        )
    )
    journal.close()
    return directory


def _limits_still_fit(plan: RunPlan, directory: Path) -> bool:
    """True if the free memory still covers the limits that the search began with: with less the machine would swap."""
    question = read_batch_journal(directory)[0]
    return (
        plan.device == "cuda"
        or not isinstance(question, BatchQuestion)
        or sum(question.limits_bytes) <= read_host_free_bytes()
    )


def batch_key(plan: RunPlan) -> str:
    """Return the key of a batch search: of model, data or script, knobs, devices and versions."""
    knobs = {name: value for name, value in plan.spec.knobs.items() if name not in SET_BY_A_BATCH_SEARCH}
    parts = (plan.spec.model, plan.spec.data, knobs, plan.device, plan.device_uuids, plan.python, plan.versions)
    return key_of_question(parts, plan)

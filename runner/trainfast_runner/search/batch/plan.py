"""The plan of a batch search of a preset or of a user's own script, checked against this machine."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainfast_runner.errors import UserError
from trainfast_runner.machine.devices import detect_machine
from trainfast_runner.machine.resource_limits import read_host_free_bytes
from trainfast_runner.records.home import Home, is_conducted
from trainfast_runner.records.run_file import ClockAnchor
from trainfast_runner.running import planning
from trainfast_runner.running.planning import RunPlan
from trainfast_runner.search.batch_journal import BatchQuestion, read_batch_journal
from trainfast_runner.search.fitted_memory import free_gpu_bytes, limit_unknown_error, limits_of
from trainfast_runner.search.journal import JournalWriter
from trainfast_runner.search.searches import (
    BATCH_KIND,
    BatchSearchOptions,
    ScriptPlanner,
    key_of_question,
    new_search,
    script_planner,
    unfinished,
)
from trainfast_runner.settings.knobs import settings_of
from trainfast_runner.settings.script_preset import ScriptPreset
from trainfast_runner.settings.spec import SET_BY_A_BATCH_SEARCH, RunSpec, strategy_of
from trainfast_runner.worker.catalog import STRATEGIES, nearest_strategy
from trainfast_runner.worker.shared.memory_limit import malloc_settings

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


def plan_spec_batch(spec: RunSpec, python: str | None) -> BatchPlan:
    """Return the checked plan of a batch search of a preset or a script. Raises UserError."""
    if spec.script is not None:
        return plan_script_batch(spec.script, settings_of(spec.knobs, spec.overrides), python)
    plan = planning.plan_run(spec, python)
    _check_preset_plan(plan)
    return BatchPlan(plan)


def plan_script_batch(preset: ScriptPreset, settings: Sequence[str], python: str | None) -> BatchPlan:
    """Return the checked plan of a script's batch search. Raises UserError."""
    plan_script_run = script_planner(preset, settings, python, SET_BY_A_BATCH_SEARCH)
    plan = plan_script_run({"steps": SCRIPT_PROBE_STEPS, "timing_warmup": UNTIMED_SCRIPT_STEPS})
    if plan.device == "cuda" and plan.memory_limit_bytes is None and free_gpu_bytes(plan) is None:
        raise limit_unknown_error()
    return BatchPlan(plan, plan_script_run)


def _check_preset_plan(plan: RunPlan) -> None:
    """Raise UserError for a preset's plan with which sizes cannot be tried."""
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


def open_batch(batch_plan: BatchPlan, home: Home, options: BatchSearchOptions) -> Path:
    """Return the directory of the search this plan continues, or of a new one with its first line written."""
    home.create()
    plan = batch_plan.plan
    key = batch_key(plan)
    earlier = None if options.fresh else unfinished(home, key, BATCH_KIND)
    # The processes of a conducted search hold a part of the memory that was free when the search began.
    if earlier is not None and (is_conducted(earlier) or _limits_still_fit(plan, earlier)):
        return earlier
    directory = new_search(home, plan.spec.name)
    spec = plan.spec
    limits = limits_of(plan)
    journal = JournalWriter(directory)
    journal.write(
        BatchQuestion(
            search_id=directory.name,
            key=key,
            **spec.record_fields(),
            device=plan.device,
            world_size=plan.world_size,
            device_uuids=plan.device_uuids,
            limits_bytes=list(limits.by_rank),
            limit_words=limits.source,
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
    """Return the key of a batch search: of model, data or script, knobs, devices and versions.

    All visible GPUs are in the key; the journal has those that the search took, the freest at its beginning.
    """
    visible: list[str | None] = []
    if plan.device == "cuda":
        visible = [gpu.uuid for gpu in detect_machine(plan.versions).gpus]
    knobs = {name: value for name, value in plan.spec.knobs.items() if name not in SET_BY_A_BATCH_SEARCH}
    parts = (plan.spec.model, plan.spec.data, knobs, plan.device, visible, plan.python, plan.versions)
    return key_of_question(parts, plan)

"""Estimate the time of a best-fit search before it starts, for `--dry-run` and beside others' load."""

from __future__ import annotations

import os
import statistics
from dataclasses import dataclass

from trainfast_runner.machine.cpu import others_cores
from trainfast_runner.machine.devices_knob import CPU
from trainfast_runner.records.home import Home
from trainfast_runner.records.run_file import RunFile
from trainfast_runner.results.bottleneck_rules import OTHERS_CPU_PERCENT
from trainfast_runner.search.best.conditions import USUAL_DISTURBANCES
from trainfast_runner.search.best.opening import (
    baseline_trial,
    check_new_budget,
    earlier_starts,
    find_unfinished,
    trial_seconds,
)
from trainfast_runner.search.best.plan import BestPlan
from trainfast_runner.search.measured_speeds import GUESSED_START_S
from trainfast_runner.search.searches import SearchOptions, knobs_key
from trainfast_runner.settings.knob_values import KnobValue

COLD_RUNS = 6
"""Cold runs of a search: two of the winner, two of the baseline, about two of the winner with a knob turned back."""
OTHERS_SEEN_S = 0.3
"""Seconds over which the load of others is measured."""
TRIAL_S = 1.0
"""Seconds of a warm trial without the start of its process, as of tiny models."""


@dataclass(frozen=True)
class Estimate:
    """The candidates of a search, and its expected time."""

    vary: dict[str, list[KnobValue]]
    left_alone: dict[str, str]
    global_batch: int | None
    candidates: int
    legal: int
    dropped: int
    processes: int
    """The fewest processes that run every value of every knob once."""
    cold_runs: int
    start_s: float
    """Seconds of the start of a process."""
    basis: str
    """The source of `start_s`, in words."""
    seconds: float
    grid_s: float
    """Seconds of a process for each legal candidate."""
    others_cpu_percent: float | None
    """The share of the CPU that others take now, which slows the trials; None if small, unknown, or on a GPU."""
    tries: int
    """About the number of candidates that the budget tries."""


def estimate(best_plan: BestPlan, home: Home, options: SearchOptions) -> Estimate:
    """Return the number of candidates and the expected time; the trials end within the budget.

    Raises UserError for a budget that the search itself would refuse.
    """
    if find_unfinished(best_plan, home, options) is None:
        check_new_budget(best_plan, home)
    return _estimate(best_plan, home, _others_percent(best_plan.plan.device))


def estimate_beside_others(best_plan: BestPlan, home: Home) -> Estimate | None:
    """Return the estimate of a checked search; None unless others take much of the CPU that trains."""
    others_percent = _others_percent(best_plan.plan.device)
    return None if others_percent is None else _estimate(best_plan, home, others_percent)


def _estimate(best_plan: BestPlan, home: Home, others_percent: float | None) -> Estimate:
    question, space = best_plan.question, best_plan.space
    legal = [candidate for candidate in space.candidates if candidate.excluded_as is None]
    levels = {name: {repr(candidate.knobs[name]) for candidate in legal} for name in (legal[0].knobs if legal else ())}
    trials = 1 + sum(len(values) - 1 for values in levels.values())
    by_knob = [
        {repr(candidate.process_knobs[name]) for candidate in legal if name in candidate.process_knobs}
        for name in levels
    ]
    min_processes = 1 + sum(max(0, len(values) - 1) for values in by_knob)
    processes = min(min_processes, len({knobs_key(candidate.process_knobs) for candidate in legal}))
    start_s, basis = _start(best_plan, home)
    trial_s = max(TRIAL_S, trial_seconds(*baseline_trial(best_plan), home) or 0.0)
    # Each new process takes its start; the trials that others disturb are void until so many were.
    per_trial_s = trial_s + start_s * (processes - 1) / max(1, trials - 1)
    first_s = start_s + trial_s * (1 if others_percent is None else 1 + USUAL_DISTURBANCES)
    left_s = question.budget_s * (1 - (others_percent or 0.0) / 100) - first_s
    trials_s = min(question.budget_s, processes * start_s + trials * TRIAL_S)
    return Estimate(
        vary=question.vary,
        left_alone=question.left_alone,
        global_batch=question.global_batch,
        candidates=len(space.candidates),
        legal=len(legal),
        dropped=space.dropped,
        processes=processes,
        cold_runs=COLD_RUNS,
        start_s=start_s,
        basis=basis,
        seconds=trials_s + COLD_RUNS * (start_s + TRIAL_S),
        grid_s=len(legal) * (start_s + TRIAL_S),
        others_cpu_percent=others_percent,
        tries=min(len(legal), 1 + int(max(0.0, left_s) / per_trial_s)),
    )


def _others_percent(device: str) -> float | None:
    cores = others_cores(OTHERS_SEEN_S) if device == CPU else None
    percent = 0.0 if cores is None else min(100.0, 100 * cores / len(os.sched_getaffinity(0)))
    return percent if percent >= OTHERS_CPU_PERCENT else None


def _start(best_plan: BestPlan, home: Home) -> tuple[float, str]:
    """Return the seconds from the start of a process of this model or script to its steady steps, and their source."""
    subject = "model" if best_plan.plan.script is None else "script"
    starts_s = earlier_starts(
        home, lambda run: run.device == best_plan.plan.device and _is_same_subject(run, best_plan)
    )
    if not starts_s:
        return GUESSED_START_S, f"assumed: no run of this {subject} was timed here"
    count = "a run" if len(starts_s) == 1 else f"{len(starts_s)} runs"
    return statistics.median(starts_s), f"as {count} of this {subject} took"


def _is_same_subject(run: RunFile, best_plan: BestPlan) -> bool:
    """True if a run is of the same model, or of the same script by its preset."""
    if best_plan.plan.script is not None:
        return run.script is not None and run.preset == best_plan.question.preset
    return run.script is None and run.model == best_plan.question.model

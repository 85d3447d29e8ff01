"""Estimate the cost of the baseline's trial from earlier runs, and refuse a budget below that cost."""

from __future__ import annotations

from collections.abc import Callable

from trainfast_runner.errors import UserError
from trainfast_runner.records.home import Home
from trainfast_runner.records.run_directory import read_run_file
from trainfast_runner.records.run_file import RunFile
from trainfast_runner.results.start_time import read_start_s
from trainfast_runner.running.planning import RunPlan
from trainfast_runner.search.best.step_rule import MIN_TRIAL_STEPS
from trainfast_runner.search.speed.device_speed_model import with_predicted_speed
from trainfast_runner.units import duration

RUNS_READ_FOR_STARTS, ENOUGH_STARTS = 50, 3
"""Number of newest runs searched for similar starts, and number of starts that is enough."""
BUDGET_PER_COST = 5
"""Chosen, not measured: a suggested budget is this many times the cost of the baseline."""
START_KNOBS = ("strategy", "engine", "compile")
"""The knobs that change the start of a process by many seconds."""


def earlier_starts(home: Home, is_alike: Callable[[RunFile], bool]) -> list[float]:
    """Return the start times in seconds of the newest similar runs, at most `ENOUGH_STARTS`; empty without any.

    Raises UserError when the home cannot be listed.
    """
    starts_s: list[float] = []
    for directory in map(home.directory, home.newest_run_ids(RUNS_READ_FOR_STARTS)):
        run = read_run_file(directory)
        if run is not None and is_alike(run) and (seconds := read_start_s(directory)):
            starts_s.append(seconds)
        if len(starts_s) == ENOUGH_STARTS:
            break
    return starts_s


def check_budget(budget_s: float, plan: RunPlan, samples_per_step: int, home: Home) -> None:
    """Raise UserError if the start of the baseline's process and the steps of its trial take longer than the budget.

    The shortest earlier start counts, and the highest predicted speed. Without an earlier start nothing is refused.
    """
    starts_s = earlier_starts(home, lambda run: _starts_alike(run, plan))
    if not starts_s:
        return
    shortest_s = min(starts_s)
    steps_s = trial_seconds(plan, samples_per_step, home) or 0.0
    cost_s = shortest_s + steps_s
    if cost_s > budget_s:
        steps_text = f", {MIN_TRIAL_STEPS} steps take {steps_s:.1f} s" if steps_s else ""
        raise budget_error(budget_s, cost_s, f": a process starts in {shortest_s:.1f} s{steps_text}")


def trial_seconds(plan: RunPlan, samples_per_step: int, home: Home) -> float | None:
    """Return the seconds of a trial's fewest steps at the highest predicted speed; None without a prediction."""
    speed = with_predicted_speed(plan, home).predicted_speed
    return None if speed is None else MIN_TRIAL_STEPS * samples_per_step / speed.high


def budget_error(budget_s: float, cost_s: float, detail: str) -> UserError:
    """Return the refusal of a budget below the cost of the baseline.

    `detail` is appended to the message, punctuation included.
    """
    suggested_s = BUDGET_PER_COST * cost_s
    return UserError(
        f"the budget of {duration(budget_s)} is below the cost of the baseline{detail}",
        key="--budget",
        advice=f"a budget of {duration(suggested_s)} or more",
        option=f"--budget {suggested_s:.0f}s or more",
    )


def _starts_alike(run: RunFile, plan: RunPlan) -> bool:
    """True if a run is of the plan's model and device, and its process starts in the same way."""
    knobs = plan.spec.knobs
    return (
        run.script is None
        and (run.model, run.device, run.device_names) == (plan.spec.model, plan.device, plan.device_names)
        and all(run.knobs.get(name) == knobs[name] for name in START_KNOBS)
    )

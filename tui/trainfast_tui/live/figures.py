"""Figures of a run for the screen and the command line: of its result, or medians of its latest steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from statistics import fmean, median
from typing import TYPE_CHECKING

import msgspec

from trainfast_runner.records.result import LOSSES_IN_A_MEAN, mean_loss
from trainfast_runner.results.distributions import median_rate
from trainfast_runner.worker.shared.words import STEP_PHASES
from trainfast_tui.text.format import count
from trainfast_tui.text.next_run_words import few_steps_note

if TYPE_CHECKING:
    from trainfast_runner.records.result import Result
    from trainfast_runner.records.run_lines import Step
    from trainfast_runner.results.device_conditions import StepConditions
    from trainfast_runner.running.follower import RunSnapshot


class Figures(msgspec.Struct, frozen=True):
    """Medians over the measured steps: throughput per second and times per step."""

    samples_per_s: float | None
    tokens_per_s: float | None
    step_ms: float | None
    phases: dict[str, float | None]
    """Milliseconds of a step by phase."""
    basis: str
    """The steps behind the medians, in words."""
    warming_up: bool = False
    """True if no step was measured yet: these are figures of the timing warm-up."""


def _figures_of_result(result: Result) -> Figures:
    times = result.step_ms
    return Figures(
        result.throughput.samples_per_s.typical,
        result.throughput.tokens_per_s.typical,
        times.p50,
        {name: getattr(times, name) for name in STEP_PHASES},
        _basis_words(result.steps.measured, ""),
    )


def run_figures(run: RunSnapshot) -> Figures:
    """Return the figures of the run's result, or the medians of its latest steps."""
    result = run.result
    return _figures_of_result(result) if result is not None and result.steps.measured else _figures_of_steps(run)


def _figures_of_steps(run: RunSnapshot) -> Figures:
    latest_steps = _latest_measured(run.steps)
    warming_up = bool(latest_steps) and latest_steps[-1].warmup
    steps = {step.step: step for step in latest_steps}
    # A step has no rate before all ranks have written it.
    rated_steps = run.rates.steps
    recent_indexes = range(max(0, len(rated_steps) - 2 * RECENT_STEPS), len(rated_steps))
    rate_indexes = [index for index in recent_indexes if rated_steps[index] in steps]
    rated = [steps[rated_steps[index]] for index in rate_indexes]
    times_ms = [step.step_ms for step in rated]
    warmup_words = "warming up" if run.is_live else "of the warm-up: no step was measured"
    words = warmup_words if warming_up else _basis_words(len(latest_steps), "the last ")
    return Figures(
        _rate([run.rates.samples_per_s[index] for index in rate_indexes], [step.samples for step in rated], times_ms),
        _rate([run.rates.tokens_per_s[index] for index in rate_indexes], [step.tokens for step in rated], times_ms),
        _median([step.step_ms for step in latest_steps]),
        {name: _median([getattr(step, f"{name}_ms") for step in latest_steps]) for name in STEP_PHASES},
        words if latest_steps else "",
        warming_up=warming_up,
    )


def _rate(rates: Sequence[float | None], works: Sequence[int | None], times_ms: Sequence[float]) -> float | None:
    """Return the median of the steps' rates; the work over the time where steps differ in size."""
    rate = _median(rates, median_rate)
    if rate is None or len(set(works)) == 1:
        return rate
    return fmean([rate or 0.0 for rate in rates], weights=times_ms)


def _basis_words(steps: int, before_number: str) -> str:
    """Return the number of steps behind the medians, in words, with a note when there are few."""
    if steps == 1:
        return "few steps: only 1 measured"
    note = few_steps_note(steps)
    return (f"{note}: " if note else "") + f"medians of {before_number}{steps} steps"


def _latest_measured(steps: Sequence[Step]) -> Sequence[Step]:
    """Return the latest measured steps; those of the timing warm-up while there are no others."""
    latest_steps = steps[-RECENT_STEPS:]
    return [step for step in latest_steps if not step.warmup] or latest_steps


def _median(values: Sequence[float | None], median_of: Callable[[Sequence[float]], float] = median) -> float | None:
    known_values = [value for value in values if value is not None]
    return median_of(known_values) if known_values else None


def run_label(run: RunSnapshot) -> str:
    """Return the run by the number of its launch, `run 12`; its id if this home did not launch it."""
    number = run.run_file.number if run.run_file is not None else None
    return run.run_id if number is None else f"run {number}"


def peak_allocated_bytes(run: RunSnapshot) -> int | None:
    """Return the peak of the run's result, else of its steps so far."""
    peak = run.result.memory.peak_allocated_bytes if run.result is not None else None
    return run.peak_allocated_bytes if peak is None else peak


def predicted_peak_bytes(run: RunSnapshot) -> int | None:
    """Return the peak in bytes that was predicted for the run before it started; None without a prediction."""
    if run.result is not None:
        return run.result.memory.predicted_bytes
    return run.run_file.predicted_bytes if run.run_file is not None else None


def first_and_last_loss(run: RunSnapshot) -> tuple[float | None, float | None]:
    """Return the first and the last loss of the run's result, else of its steps, as the result counts them.

    The last is the mean of the last `LOSSES_IN_A_MEAN` losses that were logged; None if one of them is not finite.
    """
    losses = run.result.loss if run.result is not None else None
    first, last = (losses.first, losses.last) if losses is not None else (None, None)
    if last is None:
        logged_losses = (step.loss for step in reversed(run.steps) if step.loss is not None or step.loss_not_finite)
        last = mean_loss(list(islice(logged_losses, LOSSES_IN_A_MEAN)))
    return (run.first_loss if first is None else first, last)


def planned_steps(run: RunSnapshot) -> int | None:
    """Return the number of steps that the run was started with, else that its framework knows; None while unknown."""
    steps = run.run_file.knobs.get("steps") if run.run_file is not None else None
    return steps if isinstance(steps, int) else run.planned_steps


def step_words(run: RunSnapshot) -> str:
    """Return the last step of the run: `step 12 of 800`, or `step 12` if the number of steps is unknown."""
    steps_done, planned = (run.steps[-1].step if run.steps else 0), planned_steps(run)
    return f"step {count(steps_done)} of {count(planned)}" if planned else f"step {count(steps_done)}"


def seconds_left(run: RunSnapshot) -> float | None:
    """Return the seconds to the last step at the latest pace; None if the run has ended or made no step."""
    planned, steps = planned_steps(run), _latest_measured(run.steps)
    if not run.is_live or planned is None or not steps:
        return None
    step_ms = _median([step.step_ms for step in steps])
    return None if step_ms is None else max(0, planned - run.steps[-1].step) * step_ms / 1e3


RECENT_STEPS = 20
"""A live run's figures are of this many newest steps. Conditions are means: a median would hide brief throttling."""


def counted_steps(run: RunSnapshot) -> Sequence[StepConditions]:
    """Return the steps after the timing warm-up, or all if there are none; only the newest of a live run."""
    warmup = {step.step for step in run.steps if step.warmup}
    steps = [step for step in run.conditions if step.step not in warmup] or list(run.conditions)
    return steps[-RECENT_STEPS:] if run.is_live else steps


def worst_gpu(steps: Sequence[StepConditions], cause: str) -> int | None:
    """Return the index of the GPU that this cause throttled most over the steps; None for a single device."""
    totals: dict[int | None, float] = {}
    for step in steps:
        for device in step.devices:
            totals[device.index] = totals.get(device.index, 0.0) + (device.throttled_ms.get(cause) or 0.0)
    return None if len(totals) < 2 else max(totals, key=lambda index: totals[index])

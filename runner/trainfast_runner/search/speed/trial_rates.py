"""Read the trials of a best-fit search as observations: their rates and noise, without voided processes."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from trainfast_runner.results.distributions import MAD_TO_SIGMA, MEDIAN_VARIANCE, NORMAL_95
from trainfast_runner.search.journal.best import TIMED_OUTCOMES, BestLine, EarlierEffect, Trial
from trainfast_runner.search.speed.effects import Observation
from trainfast_runner.search.speed.levels import Levels
from trainfast_runner.settings.knob_type import KnobValues

VOID_LOG_DRIFT = 0.02
"""A process is void if the ln rate of its first candidate changed by more than this until its end."""
MAX_VOID_PROCESSES = 3
"""After this many voided processes drift counts as noise of the machine, and voids no more of them."""
SURE_ERRORS = 3
"""A drift is one only beyond this many times its own error."""
MIN_SPREAD_STEPS = 3
"""The fewest steps that show a spread."""
POOL_STEPS = 4
"""Chosen, not measured: the pooled variance of a step weighs as much as this many steps of the trial itself."""
NOISE_GRID_RATIO = 1.25
"""The pooled noise is rounded to powers of this ratio, so that a new trial seldom changes the noise of all others."""
MIN_RATE_DEVIATION = 0.001
"""Chosen, not measured: the least deviation of a trial in ln rate, even if its few steps are equal."""
EARLIER_SPREAD, EARLIER_ADDED_DEVIATION = 2.0, 0.03
"""Chosen, not measured: factor on the spread of an earlier search's effect, and the deviation added to it, in ln
rate."""
DEFAULT_STEP_DEVIATION = 0.02
"""The deviation of a step before three steps of one candidate were measured."""


@dataclass(frozen=True)
class Measurements:
    """The trials that count, and the noise of their rates."""

    trials: tuple[Trial, ...]
    step_deviation: float
    """The deviation of ln step time, pooled over all trials."""
    void_run_ids: frozenset[str]
    """The run ids of voided processes."""
    drifts: tuple[float, ...]
    """The ln rate of each process's reference at its end less that at its beginning."""
    drift_variance: float = 0.0
    """Variance of each trial by drift, where drift is noise and voids no process."""
    drift_variance_by_run: Mapping[str, float] = field(default_factory=dict)
    """Variance of a trial by the drift of its process, by run id, for processes that drifted and count all the same."""

    def observations(self, levels: Levels, *, per_joule: bool) -> list[Observation]:
        """Return one observation a trial: ln samples/s, or ln samples a joule."""
        observations = []
        for trial in self.trials:
            if (value := log_rate(trial, per_joule=per_joule)) is not None:
                point = levels.points[trial.candidate_number]
                observations.append(Observation(((1.0, point),), value, self.variance(trial), trial.run_id))
        return observations

    def variance(self, trial: Trial) -> float:
        """Return the variance of a trial's ln rate by its own steps and the pooled ones."""
        deviations = _deviations(trial.step_ms)
        count, step_variance = len(deviations), self.step_deviation**2
        if count > 2:
            pooled = POOL_STEPS * step_variance
            step_variance = (pooled + count * _robust_variance(deviations)) / (POOL_STEPS + count)
        drift_variance = self.drift_variance + self.drift_variance_by_run.get(trial.run_id, 0.0)
        return MEDIAN_VARIANCE * step_variance / max(1, len(trial.step_ms)) + MIN_RATE_DEVIATION**2 + drift_variance


def measurements(lines: Iterable[BestLine], *, voids_drifted: bool = True) -> Measurements:
    """Return the trials that count: measured or slow, in no voided process.

    Without `voids_drifted` the trials of a process that drifted count, with its drift as noise. If a counted trial was
    disturbed, drift is noise in every process.
    """
    timed = [
        line
        for line in lines
        if isinstance(line, Trial) and line.outcome in TIMED_OUTCOMES and line.step_ms and min(line.step_ms) > 0
    ]
    deviation = _pooled(timed)
    is_noise = any(trial.counts_disturbed for trial in timed)
    processes: dict[str, list[Trial]] = defaultdict(list)
    for trial in timed:
        processes[trial.run_id].append(trial)
    drifted: dict[str, float] = {}
    drifts = []
    for run_id, trials in processes.items():
        drift = _drift(trials)
        if drift is None:
            continue
        size, error = drift
        drifts.append(size)
        has_drifted = abs(size) > max(VOID_LOG_DRIFT, SURE_ERRORS * error * deviation)
        if has_drifted and len(drifted) < MAX_VOID_PROCESSES and not is_noise:
            # Both ends have an error: half of the squared difference is the variance of one.
            drifted[run_id] = size * size / 2
    noise = statistics.fmean(drift * drift for drift in drifts) / 2 if is_noise and drifts else 0.0
    if not voids_drifted:
        return Measurements(tuple(timed), deviation, frozenset(), tuple(drifts), noise, drifted)
    counted = tuple(trial for trial in timed if trial.run_id not in drifted)
    return Measurements(counted, deviation, frozenset(drifted), tuple(drifts), noise)


def reference_of(trials: Sequence[Trial]) -> Trial | None:
    """Return the first trial of a process that was measured to its end; None without one.

    The repeat of that trial at the end of the process shows drift. A slow candidate would take long to repeat.
    """
    return next((trial for trial in trials if trial.outcome == "measured"), None)


def log_rate(trial: Trial, *, per_joule: bool = False) -> float | None:
    """Return the ln of samples/s by the median step, or of samples a joule; None without an energy counter."""
    if per_joule:
        return math.log(trial.samples_per_step * len(trial.step_ms) / trial.joules) if trial.joules else None
    return math.log(1000 * trial.samples_per_step / statistics.median(trial.step_ms))


def earlier_observations(levels: Levels, effects: Iterable[EarlierEffect], baseline: KnobValues) -> list[Observation]:
    """Return the effects of earlier searches as observed differences with a widened spread.

    Effects of values that no candidate has are left out.
    """
    observations = []
    for effect in effects:
        try:
            new_point, old_point = (
                levels.point({**baseline, effect.knob: value}) for value in (effect.value, effect.before)
            )
        except KeyError:
            continue
        gain = effect.gain_percent
        if effect.knob not in levels.names or min(gain.low, gain.median) <= -100:
            continue
        deviation = (math.log1p(gain.high / 100) - math.log1p(gain.low / 100)) / (2 * NORMAL_95)
        variance = (EARLIER_SPREAD * deviation) ** 2 + EARLIER_ADDED_DEVIATION**2
        observations.append(Observation(((1.0, new_point), (-1.0, old_point)), math.log1p(gain.median / 100), variance))
    return observations


def relative_error(step_ms: Sequence[float]) -> float:
    """Return the standard error of the median step time, as a share of the median; infinite below three steps."""
    deviations = _deviations(step_ms)
    return math.sqrt(MEDIAN_VARIANCE * _robust_variance(deviations) / len(step_ms)) if deviations else math.inf


def steps_for(deviation: float, error: float, min_steps: int, max_steps: int) -> int:
    """Return the steps, from `min_steps` to `max_steps`, after which the median's expected standard error is `error`.

    `deviation` is that of ln step time.
    """
    return max(min_steps, min(max_steps, math.ceil(MEDIAN_VARIANCE * (deviation / error) ** 2)))


def _drift(trials: Sequence[Trial]) -> tuple[float, float] | None:
    """Return the ln rate of a process's reference at the end less that at the beginning; None without a repeat.

    The second figure is the error of the first, in deviations of a step.
    """
    reference = reference_of(trials)
    if reference is None:
        return None
    first_trials = [
        trial for trial in trials if trial.candidate_number == reference.candidate_number and not trial.repeats
    ]
    last_trials = [trial for trial in trials if trial.candidate_number == reference.candidate_number and trial.repeats]
    if not first_trials or not last_trials:
        return None
    begin = [step for trial in first_trials for step in trial.step_ms]
    end = [step for trial in last_trials for step in trial.step_ms]
    size = math.log(statistics.median(begin) / statistics.median(end))
    return size, math.sqrt(MEDIAN_VARIANCE * (1 / len(begin) + 1 / len(end)))


def _deviations(step_ms: Sequence[float]) -> list[float]:
    """Return the ln of each step less that of the median step; empty below three steps, too few for a spread."""
    if len(step_ms) < MIN_SPREAD_STEPS:
        return []
    middle = math.log(statistics.median(step_ms))
    return [math.log(step) - middle for step in step_ms]


def _robust_variance(deviations: Sequence[float]) -> float:
    """Return the variance by the median absolute deviation.

    The factor n / (n - 1) corrects for the median, which is taken from the same values.
    """
    if not deviations:
        return 0.0
    deviation = MAD_TO_SIGMA * statistics.median(map(abs, deviations))
    return deviation**2 * len(deviations) / max(1, len(deviations) - 1)


def _pooled(trials: Sequence[Trial]) -> float:
    """Return the deviation of ln step time, pooled over all trials and rounded to a grid."""
    residuals = [
        abs(deviation) * math.sqrt(len(trial.step_ms) / (len(trial.step_ms) - 1))
        for trial in trials
        for deviation in _deviations(trial.step_ms)
    ]
    noise = MAD_TO_SIGMA * statistics.median(residuals) if residuals else DEFAULT_STEP_DEVIATION
    return float(NOISE_GRID_RATIO ** round(math.log(max(noise, MIN_RATE_DEVIATION)) / math.log(NOISE_GRID_RATIO)))

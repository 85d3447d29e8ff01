"""Read the trials of a best-fit search as observations: rates, their noise, voided visits and the cost of a process."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from trainfast_runner.records.run_file import RecordedKnobs
from trainfast_runner.results.distributions import MAD_TO_SIGMA, MEDIAN_VARIANCE, NORMAL_95
from trainfast_runner.search.journal.best import TIMED_OUTCOMES, BestLine, EarlierEffect, Trial, Visited
from trainfast_runner.search.speed.effects import Levels, Observation

DRIFT = 0.02
"""A process whose first candidate is off by more than this at its end is void."""
MOST_VOID_VISITS = 3
"""After this many voided visits drift counts as noise of the machine, and voids no more visits."""
POOL_STEPS = 4
"""The pooled variance of a step weighs as much as this many steps of the trial itself."""
GRID = 1.25
"""The pooled noise is rounded to powers of this, so that one more trial seldom changes that of all others."""
LEAST_NOISE = 0.001
EARLIER_SPREAD, EARLIER_LEAST = 2.0, 0.03
"""Factor on the spread of an earlier search's effect, and the deviation added to it, in ln rate."""
DEFAULT_NOISE = 0.02
"""The deviation of a step before three steps of one candidate were measured."""


@dataclass(frozen=True)
class Measurements:
    """The trials that count. `step_deviation` is the pooled deviation of ln step time; `void` the run ids of voided
    visits, `drifts` what the first candidate of each process was off at its end, in ln rate. Where drift voids no visit
    it is noise, of `drift_variance` in each trial."""

    trials: tuple[Trial, ...]
    step_deviation: float
    void: frozenset[str]
    drifts: tuple[float, ...]
    drift_variance: float = 0.0

    def observations(self, levels: Levels, joules: bool) -> list[Observation]:
        """One observation a trial: ln samples/s, or ln samples a joule."""
        observed = []
        for trial in self.trials:
            if (value := log_rate(trial, joules)) is not None:
                point = levels.points[trial.candidate_number]
                observed.append(Observation(((1.0, point),), value, self.variance(trial), trial.run_id))
        return observed

    def variance(self, trial: Trial) -> float:
        """Variance of a trial's ln rate by its own steps and the pooled ones."""
        deviations = _deviations(trial.step_ms)
        count = len(deviations)
        pooled = POOL_STEPS * self.step_deviation**2
        mixed = (
            (pooled + count * _robust_variance(deviations)) / (POOL_STEPS + count)
            if count > 2
            else self.step_deviation**2
        )
        return MEDIAN_VARIANCE * mixed / max(1, len(trial.step_ms)) + LEAST_NOISE**2 + self.drift_variance


def measurements(lines: Iterable[BestLine], *, voids_drifted: bool = True) -> Measurements:
    """Return the trials that count: measured or slow, in no voided visit.

    Without `voids_drifted` drift is noise, as where trials count that other processes disturbed.
    """
    timed = [
        line
        for line in lines
        if isinstance(line, Trial) and line.outcome in TIMED_OUTCOMES and line.step_ms and min(line.step_ms) > 0
    ]
    deviation = _pooled(timed)
    is_noise = not voids_drifted or any(trial.outcome == "measured" and trial.reason for trial in timed)
    visits: dict[str, list[Trial]] = defaultdict(list)
    for trial in timed:
        visits[trial.run_id].append(trial)
    void: list[str] = []
    drifts = []
    for run_id, trials in visits.items():
        drift = _drift(trials)
        if drift is None:
            continue
        size, error = drift
        drifts.append(size)
        if abs(size) > max(DRIFT, 3 * error * deviation) and len(void) < MOST_VOID_VISITS and not is_noise:
            void.append(run_id)
    counted = tuple(trial for trial in timed if trial.run_id not in void)
    # Both ends of a process have an error.
    noise = statistics.fmean(drift * drift for drift in drifts) / 2 if is_noise and drifts else 0.0
    return Measurements(counted, deviation, frozenset(void), tuple(drifts), noise)


def log_rate(trial: Trial, joules: bool = False) -> float | None:
    """The ln of samples/s by the median step, or of samples a joule; None without a counter."""
    if joules:
        return math.log(trial.samples_per_step * len(trial.step_ms) / trial.joules) if trial.joules else None
    return math.log(1000 * trial.samples_per_step / statistics.median(trial.step_ms))


def earlier_observations(
    levels: Levels, effects: Iterable[EarlierEffect], baseline: RecordedKnobs
) -> list[Observation]:
    """Effects of earlier searches as observed differences with a widened spread; those of unknown values left out."""
    observed = []
    for effect in effects:
        try:
            ends = [levels.point({**baseline, effect.knob: value}) for value in (effect.value, effect.before)]
        except KeyError:
            continue
        gain = effect.gain_percent
        if effect.knob not in levels.names or min(gain.low, gain.median) <= -100:
            continue
        deviation = (math.log1p(gain.high / 100) - math.log1p(gain.low / 100)) / (2 * NORMAL_95)
        variance = (EARLIER_SPREAD * deviation) ** 2 + EARLIER_LEAST**2
        observed.append(Observation(((1.0, ends[0]), (-1.0, ends[1])), math.log1p(gain.median / 100), variance))
    return observed


ProcessKey = tuple[tuple[str, object], ...]
"""The knobs that need a process of their own, as a key."""


class Starts:
    """Seconds until a process takes its first timed step, by the knobs that need a new one."""

    COMPILE_S, GUESS_S = 40.0, 10.0
    """Assumed before any process was started, and for compilation before any was compiled."""

    def __init__(self, lines: Sequence[BestLine]) -> None:
        untimed: dict[str, float] = {}
        for line in lines:
            if isinstance(line, Trial) and not line.warm and line.run_id not in untimed:
                untimed[line.run_id] = max(0.0, line.seconds - sum(line.step_ms) / 1000)
        seen: dict[ProcessKey, list[float]] = defaultdict(list)
        for line in lines:
            if isinstance(line, Visited):
                seen[process_key(line.process_knobs)].append(line.start_s + untimed.get(line.run_id, 0.0))
        self._seen = {key: statistics.median(seconds) for key, seconds in seen.items()}
        self._guessed: dict[ProcessKey, float] = {}

    def seconds(self, key: ProcessKey) -> float:
        """The measured start of this process, or that of the most similar one; more if nothing was compiled yet."""
        if key in self._seen:
            return self._seen[key]
        if key not in self._guessed:
            self._guessed[key] = self._guess(dict(key))
        return self._guessed[key]

    def _guess(self, process: Mapping[str, object]) -> float:
        compiles = process.get("compile", "off") != "off"
        if not self._seen:
            return self.GUESS_S + (self.COMPILE_S if compiles else 0.0)
        known = [(sum(process.get(name) == value for name, value in key), key) for key in self._seen]
        alike = [
            (same, self._seen[key]) for same, key in known if (dict(key).get("compile", "off") != "off") == compiles
        ]
        if alike:
            return max(alike)[1]
        return max((same, self._seen[key]) for same, key in known)[1] + (self.COMPILE_S if compiles else 0.0)


def process_key(process: Mapping[str, object]) -> ProcessKey:
    """The knobs of a process as a key."""
    return tuple(sorted(process.items(), key=lambda item: item[0]))


def switch_seconds(trials: Iterable[Trial]) -> float:
    """The median seconds that a warm trial takes beside its timed steps; 0.3 before any."""
    beside = [max(0.0, trial.seconds - sum(trial.step_ms) / 1000) for trial in trials if trial.warm]
    return statistics.median(beside) if beside else 0.3


def relative_error(step_ms: Sequence[float]) -> float:
    """The standard error of the median step time, as a share of the median, by these steps alone."""
    deviations = _deviations(step_ms)
    return math.sqrt(MEDIAN_VARIANCE * _robust_variance(deviations) / len(step_ms)) if deviations else math.inf


def steps_for(deviation: float, error: float, least: int, most: int) -> int:
    """Steps after which the median's standard error is expected to be this small, by the deviation of ln step time."""
    return max(least, min(most, math.ceil(MEDIAN_VARIANCE * (deviation / error) ** 2)))


def _drift(trials: Sequence[Trial]) -> tuple[float, float] | None:
    """The ln rate of a visit's first candidate at its end less that at its beginning, and the factor of a step's
    deviation that is its error; None if it was not repeated."""
    first = [trial for trial in trials if trial.candidate_number == trials[0].candidate_number and not trial.repeats]
    last = [trial for trial in trials if trial.repeats]
    if not first or not last:
        return None
    begin = [step for trial in first for step in trial.step_ms]
    end = [step for trial in last for step in trial.step_ms]
    size = math.log(statistics.median(begin) / statistics.median(end))
    return size, math.sqrt(MEDIAN_VARIANCE * (1 / len(begin) + 1 / len(end)))


def _deviations(step_ms: Sequence[float]) -> list[float]:
    """The ln of each step less that of the median one; empty below three steps, too few for a spread."""
    if len(step_ms) < 3:
        return []
    middle = math.log(statistics.median(step_ms))
    return [math.log(step) - middle for step in step_ms]


def _robust_variance(deviations: Sequence[float]) -> float:
    """The variance by the median absolute deviation; a few values have lost about one to their own median."""
    if not deviations:
        return 0.0
    deviation = MAD_TO_SIGMA * statistics.median(map(abs, deviations))
    return deviation**2 * len(deviations) / max(1, len(deviations) - 1)


def _pooled(trials: Sequence[Trial]) -> float:
    """The deviation of ln step time, pooled over all trials, on a grid."""
    residuals = [
        abs(deviation) * math.sqrt(len(trial.step_ms) / (len(trial.step_ms) - 1))
        for trial in trials
        for deviation in _deviations(trial.step_ms)
    ]
    noise = MAD_TO_SIGMA * statistics.median(residuals) if residuals else DEFAULT_NOISE
    return float(GRID ** round(math.log(max(noise, LEAST_NOISE)) / math.log(GRID)))

"""The effects model of a best-fit search, and the noise of its trials.

ln of the rate is a sum of knob effects, shrunk pairwise terms, a process's effect and noise: a Gaussian process whose
covariance is that sum (Duvenaud, Nickisch and Rasmussen, "Additive Gaussian Processes", 2011). The posterior over all
candidates is exact: by the vector L^-1 k(x) of each candidate x, where L is the Cholesky factor of the covariance of
the observations (Rasmussen and Williams, "Gaussian Processes for Machine Learning", 2.1).
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from trainfast_runner.results.distributions import MAD_TO_SIGMA, MEDIAN_VARIANCE
from trainfast_runner.search.best_journal import TIMED_OUTCOMES, BestLine, ProcessReady, Trial
from trainfast_runner.search.searches import BATCH_KNOBS, MESH_KNOBS, KnobsKey, knobs_key
from trainfast_runner.settings.knob_values import KnobValue, KnobValues

DRIFT_LOG_RATE = 0.02
"""A process has drifted if the ln rate of its first candidate changed by more than this until its end."""
SURE_ERRORS = 3
"""A drift is one only beyond this many times its own error."""
POOL_STEPS = 4
"""Chosen, not measured: the pooled variance of a step weighs as much as this many steps of the trial itself."""
MAX_VOID_PROCESSES = 2
"""Chosen, not measured: from the third drifted process on drift is the machine's normal noise."""
MIN_RATE_DEVIATION = 0.001
"""Chosen, not measured: the least deviation of a trial in ln rate, even if its few steps are equal."""
DEFAULT_STEP_DEVIATION = 0.02
"""The deviation of a step before three steps of one candidate were measured."""


@dataclass(frozen=True)
class Measurements:
    """The trials that count, and the noise of their rates."""

    trials: tuple[Trial, ...]
    step_deviation: float
    """The deviation of ln step time, pooled over all trials."""
    drifts: Mapping[str, float]
    """The change of the ln rate in each process that drifted, by run id."""

    @property
    def void_processes(self) -> list[str]:
        """The first processes that drifted: their trials are void and repeated."""
        return [*self.drifts][:MAX_VOID_PROCESSES]

    def variance(self, trial: Trial) -> float:
        """Return the variance of a trial's ln rate by its own steps, the pooled ones and the drift of its process."""
        deviations = _deviations(trial.step_ms)
        count, step_variance = len(deviations), self.step_deviation**2
        if count:
            pooled = POOL_STEPS * step_variance
            step_variance = (pooled + count * _robust_variance(deviations)) / (POOL_STEPS + count)
        # Both ends of a drift have an error: half of its square is the variance of one.
        drift_variance = self.drifts.get(trial.run_id, 0.0) ** 2 / 2
        return MEDIAN_VARIANCE * step_variance / max(1, len(trial.step_ms)) + MIN_RATE_DEVIATION**2 + drift_variance


def measurements(lines: Iterable[BestLine], *, can_repeat: bool = False) -> Measurements:
    """Return the trials that were measured or given up as slow, without those of void processes.

    Unless trials `can_repeat`, a void trial counts, with the drift as noise, if no steady process tried its candidate.
    """
    processes: dict[str, list[Trial]] = defaultdict(list)
    for line in lines:
        if isinstance(line, Trial) and line.outcome in TIMED_OUTCOMES and line.step_ms and min(line.step_ms) > 0:
            processes[line.run_id].append(line)
    trials = [trial for of_process in processes.values() for trial in of_process]
    residuals = [
        abs(deviation) * math.sqrt(len(trial.step_ms) / (len(trial.step_ms) - 1))
        for trial in trials
        for deviation in _deviations(trial.step_ms)
    ]
    noise = MAD_TO_SIGMA * statistics.median(residuals) if residuals else DEFAULT_STEP_DEVIATION
    deviation = max(noise, MIN_RATE_DEVIATION)
    drifts = {run_id: drift for run_id, same in processes.items() if (drift := _drift(same, deviation))}
    measured = Measurements(tuple(trials), deviation, drifts)
    void = measured.void_processes
    steady = {trial.candidate_number for trial in trials if trial.run_id not in void}
    counted = [
        trial for trial in trials if trial.run_id not in void or not (can_repeat or trial.candidate_number in steady)
    ]
    return replace(measured, trials=tuple(counted))


def _drift(trials: Sequence[Trial], deviation: float) -> float:
    """Return the ln rate of a process's reference at the end less that at the beginning; 0 without a sure drift."""
    reference = reference_of(trials)
    same = [trial for trial in trials if reference and trial.candidate_number == reference.candidate_number]
    begin, end = ([step for trial in same if trial.repeats == late for step in trial.step_ms] for late in (False, True))
    if not begin or not end:
        return 0.0
    drift = math.log(statistics.median(begin) / statistics.median(end))
    error = deviation * math.sqrt(MEDIAN_VARIANCE * (1 / len(begin) + 1 / len(end)))
    return drift if abs(drift) > max(DRIFT_LOG_RATE, SURE_ERRORS * error) else 0.0


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


def relative_error(step_ms: Sequence[float]) -> float:
    """Return the standard error of the median step time, as a share of the median; infinite below three steps."""
    deviations = _deviations(step_ms)
    return math.sqrt(MEDIAN_VARIANCE * _robust_variance(deviations) / len(step_ms)) if deviations else math.inf


def steps_for(deviation: float, error: float, min_steps: int, max_steps: int) -> int:
    """Return the steps, from `min_steps` to `max_steps`, after which the median's expected standard error is `error`.

    `deviation` is that of ln step time.
    """
    return max(min_steps, min(max_steps, math.ceil(MEDIAN_VARIANCE * (deviation / error) ** 2)))


def _deviations(step_ms: Sequence[float]) -> list[float]:
    """Return the ln of each step less that of the median step; empty below three steps, too few for a spread."""
    if len(step_ms) < 3:
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


Array = NDArray[np.float64]
Point = tuple[int, ...]
"""The level of each modelled knob: the index of its value among the values that the candidates have."""
Points = NDArray[np.int_]
"""Points as rows."""
SMOOTH_KNOBS = frozenset((*BATCH_KNOBS, "seq_len", "workers", "prefetch", "micro_batches", "tp_degree", "pp_degree"))
"""Numeric knobs whose similar values have similar effects."""
LENGTH_SCALE_LOG2 = 1.4
"""Two values of a smooth knob a factor of 2**LENGTH_SCALE_LOG2 apart share exp(-1/2) of their effect.

With 2.0, and pairs from 0.02, a search stopped short in 5 of 100 synthetic spaces, now in 1."""


class Levels:
    """The points of all candidates, and the correlation of every two levels of a knob."""

    def __init__(self, candidates: Sequence[KnobValues]) -> None:
        columns = {name: [_typed(candidate[name]) for candidate in candidates] for name in candidates[0]}
        self.names = _modelled_knobs(columns)
        distinct = {name: list(dict.fromkeys(columns[name])) for name in self.names}
        self.values = {name: [value for _, value in distinct[name]] for name in self.names}
        level_of = {name: {key: level for level, key in enumerate(distinct[name])} for name in self.names}
        by_knob = [map(level_of[name].__getitem__, columns[name]) for name in self.names]
        self.points: list[Point] = list(zip(*by_knob, strict=True)) or [()] * len(candidates)
        self._correlations = [_correlations(name, self.values[name]) for name in self.names]
        self._numbers = {point: number for number, point in enumerate(self.points)}
        self.array: Points = np.array(self.points, dtype=int).reshape(len(self.points), len(self.names))

    def with_level(self, number: int, name: str, level: int) -> int | None:
        """Return the candidate that differs only by a knob's level and the knobs decided by it; None without one."""
        point = list(self.points[number])
        point[self.names.index(name)] = level
        return self._numbers.get(tuple(point))

    def covariance_parts(self, points: Points, others: Points) -> Array:
        """Return the parts of the prior covariance of every two points, before `Scales` multiply them.

        They are: of the mean; the sum over knobs of the correlations of their levels; twice the sum over pairs of knobs
        of the products of these; 1 if every level is the same.
        """
        totals, squares = np.zeros((2, len(points), len(others)))
        same = np.ones((len(points), len(others)), dtype=bool)
        for table, levels, other_levels in zip(self._correlations, points.T, others.T, strict=True):
            correlations = table[levels][:, other_levels]
            totals += correlations
            squares += correlations * correlations
            same &= levels[:, None] == other_levels
        # Twice the sum over pairs of products is the square of the sum without the squares.
        return np.stack([np.ones_like(totals), totals, totals * totals - squares, same])


def _modelled_knobs(columns: Mapping[str, Sequence[object]]) -> list[str]:
    """Return the knobs that have several values, without a batch or accumulation that the other knobs decide.

    `columns` has the values of all candidates, by knob.
    """
    names = [name for name, column in columns.items() if len(set(column)) > 1]
    for derived in reversed(BATCH_KNOBS):
        if derived in names:
            others = [columns[name] for name in names if name in (*BATCH_KNOBS, *MESH_KNOBS) and name != derived]
            if len(set(zip(*others, columns[derived], strict=True))) == len(set(zip(*others, strict=True))):
                names.remove(derived)
    return names


def _correlations(name: str, values: Sequence[object]) -> Array:
    """Return the correlation of the effects of every two values.

    Two numbers of a smooth knob correlate by their distance in log2, two values of another knob do not correlate.
    """
    if name not in SMOOTH_KNOBS or not all(isinstance(value, int | float) for value in values):
        return np.eye(len(values))
    # Zero loader processes are as far from one as one is from two.
    logs = np.array([math.log2(max(float(str(value)), 0.5)) for value in values])
    result: Array = np.exp(-0.5 * ((logs[:, None] - logs) / LENGTH_SCALE_LOG2) ** 2)
    return result


def _typed(value: KnobValue) -> tuple[type, KnobValue]:
    """Return a key that is equal only for equal values of the same type: 1 is not 1.0, nor True."""
    return type(value), value


MEAN_VARIANCE = 4.0
"""Prior variance of the mean of ln rate, large because the mean is unknown."""
RESIDUAL_SHARE = 0.5
"""Standard deviation of the residual, as a share of that of the pairwise terms."""


@dataclass(frozen=True)
class Scales:
    """Prior standard deviations, in ln rate: of a knob's effect, of a pairwise term, between processes."""

    main: float = 0.3
    pair: float = 0.08
    process: float = 0.01


def _prior(parts: Array, scales: Scales) -> Array:
    """Return the covariances before any trial, the kernel of the Gaussian process, from their parts."""
    residual = (RESIDUAL_SHARE * scales.pair) ** 2
    # The pairwise part counts each pair twice.
    covariances: Array = np.tensordot((MEAN_VARIANCE, scales.main**2, scales.pair**2 / 2, residual), parts, 1)
    return covariances


MIN_SCALED_TRIALS = 8
"""From this number of trials on they choose the scales of the effects."""
MAIN_DEVIATIONS, PAIR_DEVIATIONS, PROCESS_DEVIATIONS = (0.15, 0.3, 0.6), (0.04, 0.08, 0.16), (0.003, 0.01, 0.03, 0.08)
"""The `Scales` to choose from: of effects, of pairwise terms, between processes."""


class Posterior:
    """Mean and variance of every candidate's ln samples/s, or ln samples a joule, after the trials."""

    def __init__(self, levels: Levels, measured: Measurements, *, per_joule: bool) -> None:
        self.levels = levels
        rates = [(trial, log_rate(trial, per_joule=per_joule)) for trial in measured.trials]
        trials = [trial for trial, rate in rates if rate is not None]
        points = levels.array[np.array([trial.candidate_number for trial in trials], dtype=int)]
        # The prior mean is the first rate.
        values = np.array([rate for _, rate in rates if rate is not None])
        center = values[0] if len(values) else 0.0
        self._values = values - center
        self._parts = levels.covariance_parts(points, points)
        processes = np.array([trial.run_id for trial in trials])
        self._same_process = processes[:, None] == processes
        self._noise = np.diag(np.array([measured.variance(trial) for trial in trials], dtype=float))
        self.scales = self._likeliest_scales() if len(values) >= MIN_SCALED_TRIALS else Scales()
        rows, whitened = self._factor(self.scales)
        # Not `@` or `solve`: the threads of BLAS spin beside a busy process, and made a decision four times as long.
        self._components = np.einsum("ij,jk->ik", np.linalg.inv(rows), self._between(points, levels.array))
        self.mean: Array = center + whitened @ self._components
        # Every point has the same covariance with itself.
        own_variance = self._between(levels.array[:1], levels.array[:1])[0, 0]
        self.variance: Array = np.maximum(own_variance - np.square(self._components).sum(axis=0), 0.0)

    def covariances(self, number: int) -> Array:
        """Return the posterior covariance of a candidate with every candidate."""
        prior: Array = self._between(self.levels.array[[number]], self.levels.array)[0]
        covariances: Array = prior - self._components[:, number] @ self._components
        return covariances

    def _between(self, points: Points, others: Points) -> Array:
        return _prior(self.levels.covariance_parts(points, others), self.scales)

    def _factor(self, scales: Scales) -> tuple[Array, Array]:
        """Return the Cholesky factor of the trials' covariance, and the whitened rates."""
        covariances = _prior(self._parts, scales) + scales.process**2 * self._same_process + self._noise
        rows: Array = np.linalg.cholesky(covariances).astype(np.float64)
        return rows, np.linalg.solve(rows, self._values)

    def _likeliest_scales(self) -> Scales:
        """Return the scales under which the rates are most likely."""

        @cache
        def log_likelihood(scales: Scales) -> float:
            rows, whitened = self._factor(scales)
            return float(-np.log(rows.diagonal()).sum() - 0.5 * whitened @ whitened)

        best = Scales()
        for _ in range(2):
            best = max((replace(best, main=main) for main in MAIN_DEVIATIONS), key=log_likelihood)
            best = max((replace(best, pair=pair) for pair in PAIR_DEVIATIONS), key=log_likelihood)
            best = max((replace(best, process=process) for process in PROCESS_DEVIATIONS), key=log_likelihood)
        return best


GUESSED_START_S, GUESSED_COMPILATION_S, GUESSED_SWITCH_S = 10.0, 40.0, 0.3
"""Assumed before the first process start, the first compilation and the first warm trial."""


class ProcessStarts:
    """Seconds until a process takes its first timed step, by its key."""

    def __init__(self, lines: Sequence[BestLine]) -> None:
        trials = [line for line in lines if isinstance(line, Trial)]
        first_untimed_s = {trial.run_id: _untimed_s(trial) for trial in reversed(trials) if not trial.warm}
        starts_s: dict[KnobsKey, list[float]] = defaultdict(list)
        for line in lines:
            if isinstance(line, ProcessReady):
                starts_s[knobs_key(line.process_knobs)].append(line.start_s + first_untimed_s.get(line.run_id, 0.0))
        self._measured_s = {key: statistics.median(seconds) for key, seconds in starts_s.items()}
        warm_trials = [_untimed_s(trial) for trial in trials if trial.warm]
        self.switch_s = statistics.median(warm_trials or [GUESSED_SWITCH_S])
        """Expected seconds of a warm trial without its timed steps."""

    def seconds(self, key: KnobsKey) -> float:
        """Return the measured start of this process, else that of the most similar one that compiles or does not."""
        if key in self._measured_s:
            return self._measured_s[key]
        alike = {other: seconds for other, seconds in self._measured_s.items() if _compiles(other) == _compiles(key)}
        if alike:
            return alike[max(alike, key=lambda other: (len(set(other) & set(key)), alike[other]))]
        compilation_s = GUESSED_COMPILATION_S if _compiles(key) else 0.0
        return min(self._measured_s.values(), default=GUESSED_START_S) + compilation_s


def _compiles(key: KnobsKey) -> bool:
    return dict(key).get("compile", "off") != "off"


def _untimed_s(trial: Trial) -> float:
    return max(0.0, trial.seconds - sum(trial.step_ms) / 1000)

"""The effects model of a best-fit search, and the noise of its trials.

ln of the rate is a sum of knob effects, shrunk pairwise terms, a process's effect and noise: a Gaussian process whose
covariance is that sum (Duvenaud, Nickisch and Rasmussen, "Additive Gaussian Processes", 2011). The posterior over all
candidates is exact: by the vector L^-1 k(x) of each candidate x, where L is the Cholesky factor of the covariance of
the observations (Rasmussen and Williams, "Gaussian Processes for Machine Learning", 2.1).
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainfast_runner.results.distributions import MAD_TO_SIGMA, MEDIAN_VARIANCE
from trainfast_runner.search.best_journal import BestLine, ProcessReady, Trial
from trainfast_runner.search.searches import BATCH_KNOBS, MESH_KNOBS, KnobsKey, knobs_key
from trainfast_runner.settings.knob_values import KnobValues

UNTIMED_TRIAL_STEPS = 2
"""Steps before a trial's timed ones: from the second on the optimizer has states, and a CPU's memory is measured."""
MIN_TIMED_STEPS, MAX_TIMED_STEPS, ENOUGH_ERROR = 4, 25, 0.012
"""Timed steps of a trial, and the standard error of their median that is enough, as a share of the median."""
MIN_RATE_DEVIATION = 0.001
"""Chosen, not measured: the least deviation of a trial in ln rate, even if its few steps are equal."""
DEFAULT_STEP_DEVIATION = 0.02
"""The deviation of a step before three steps of one candidate were measured."""


@dataclass(frozen=True)
class StepRule:
    """The number of timed steps of a trial: from `min_steps` to `max_steps`, as many as their scatter needs."""

    min_steps: int = MIN_TIMED_STEPS
    max_steps: int = MAX_TIMED_STEPS
    standard_error: float = ENOUGH_ERROR
    give_up_ms: float | None = None
    """A trial whose best step is slower than this ends; None for no bound."""

    def judge(self, step_ms: Sequence[float]) -> Literal["more", "enough", "slow"]:
        """Judge a trial by the times of its steps so far: it needs more, has enough, or the candidate is too slow."""
        if self.give_up_ms is not None and len(step_ms) >= 2 and min(step_ms) > self.give_up_ms:
            return "slow"
        is_exact = len(step_ms) >= self.max_steps or relative_error(step_ms) <= self.standard_error
        return "enough" if len(step_ms) >= self.min_steps and is_exact else "more"

    def steps_at(self, deviation: float) -> int:
        """Return the steps after which the expected error is `standard_error`, where ln step time has `deviation`."""
        needed = math.ceil(MEDIAN_VARIANCE * (deviation / self.standard_error) ** 2)
        return max(self.min_steps, min(self.max_steps, needed))


def relative_error(step_ms: Sequence[float]) -> float:
    """Return the standard error of the median step time, as a share of the median; infinite below three steps."""
    if not (residuals := _residuals(step_ms)):
        return math.inf
    return MAD_TO_SIGMA * statistics.median(residuals) * math.sqrt(MEDIAN_VARIANCE / len(step_ms))


def _residuals(step_ms: Sequence[float]) -> list[float]:
    """Return how far the ln of each step is from that of the median step; empty below three steps, too few.

    The factor corrects for the median, which is taken from the same values.
    """
    if len(step_ms) < 3:
        return []
    middle, factor = math.log(statistics.median(step_ms)), math.sqrt(len(step_ms) / (len(step_ms) - 1))
    return [factor * abs(math.log(step) - middle) for step in step_ms]


def log_rate(trial: Trial, *, per_joule: bool = False) -> float | None:
    """Return the ln of samples/s by the median step, or of samples a joule; None without an energy counter."""
    if per_joule:
        return math.log(trial.samples_per_step * len(trial.step_ms) / trial.joules) if trial.joules else None
    return math.log(1000 * trial.samples_per_step / statistics.median(trial.step_ms))


DRIFT_LOG_RATE = 0.02
"""A process has drifted if the ln rate of its first candidate changed by more than this until its end."""
SURE_ERRORS = 3
"""A drift is one only beyond this many times its own error."""
MAX_VOID_PROCESSES = 2
"""Chosen, not measured: from the third drifted process on drift is the machine's normal noise."""


class Measurements:
    """The trials that were measured or given up as slow, without those of void processes, and the noise of their rates.

    Unless trials `can_repeat`, a void trial counts, with the drift as noise, if no steady process tried its candidate.
    """

    def __init__(self, lines: Iterable[BestLine], *, can_repeat: bool = False) -> None:
        timed = [line for line in lines if isinstance(line, Trial) and line.is_timed]
        processes: dict[str, list[Trial]] = defaultdict(list)
        for trial in timed:
            processes[trial.run_id].append(trial)
        residuals = [residual for trial in timed for residual in _residuals(trial.step_ms)]
        noise = MAD_TO_SIGMA * statistics.median(residuals) if residuals else DEFAULT_STEP_DEVIATION
        self.step_deviation = max(noise, MIN_RATE_DEVIATION)
        """The deviation of ln step time, pooled over all trials."""
        self.drifts = {run_id: drift for run_id, same in processes.items() if (drift := self._drift(same))}
        """The change of the ln rate in each process that drifted, by run id."""
        self.void_processes = [*self.drifts][:MAX_VOID_PROCESSES]
        """The first processes that drifted: their trials are void and repeated."""
        steady = {trial.candidate_number for trial in timed if trial.run_id not in self.void_processes}
        self.trials = [
            trial
            for trial in timed
            if trial.run_id not in self.void_processes or not (can_repeat or trial.candidate_number in steady)
        ]

    def _drift(self, trials: Sequence[Trial]) -> float:
        """Return the ln rate of a process's reference at the end less that at the beginning; 0 without a sure drift."""
        reference = reference_of(trials)
        same = [trial for trial in trials if reference and trial.candidate_number == reference.candidate_number]
        begin, end = (
            [step for trial in same if trial.repeats == late for step in trial.step_ms] for late in (False, True)
        )
        if not begin or not end:
            return 0.0
        drift = math.log(statistics.median(begin) / statistics.median(end))
        error = self.step_deviation * math.sqrt(MEDIAN_VARIANCE * (1 / len(begin) + 1 / len(end)))
        return drift if abs(drift) > max(DRIFT_LOG_RATE, SURE_ERRORS * error) else 0.0

    def variance(self, trial: Trial) -> float:
        """Return the variance of a trial's ln rate by the pooled steps and the drift of its process."""
        # Both ends of a drift have an error: half of its square is the variance of one.
        drift_variance = self.drifts.get(trial.run_id, 0.0) ** 2 / 2
        steps_variance = MEDIAN_VARIANCE * self.step_deviation**2 / max(1, len(trial.step_ms))
        return steps_variance + MIN_RATE_DEVIATION**2 + drift_variance


def reference_of(trials: Sequence[Trial]) -> Trial | None:
    """Return the first trial of a process that was measured to its end; None without one.

    The repeat of that trial at the end of the process shows drift. A slow candidate would take long to repeat.
    """
    return next((trial for trial in trials if trial.outcome == "measured"), None)


Array = NDArray[np.float64]
Points = NDArray[np.int_]
"""A row of levels for each candidate: a level is the index of a knob's value among the values that candidates have."""
SMOOTH_KNOBS = frozenset((*BATCH_KNOBS, "seq_len", "workers", "prefetch", "micro_batches", "tp_degree", "pp_degree"))
"""Numeric knobs whose similar values have similar effects."""
LENGTH_SCALE_LOG2 = 1.4
"""Two values of a smooth knob a factor of 2**LENGTH_SCALE_LOG2 apart share exp(-1/2) of their effect.

With 2.0, and pairs from 0.02, a search stopped short in 5 of 100 synthetic spaces, now in 1."""


def similarity(values: Sequence[object], *, is_smooth: bool) -> Array:
    """Return the correlation of the effects of every two values of a knob.

    Two numbers of a smooth knob correlate by their distance in log2; other values only with equal ones.
    """
    if is_smooth and all(isinstance(value, int | float) for value in values):
        # Zero loader processes are as far from one as one is from two.
        logs = np.array([math.log2(max(float(str(value)), 0.5)) for value in values])
        smooth: Array = np.exp(-0.5 * ((logs[:, None] - logs) / LENGTH_SCALE_LOG2) ** 2)
        return smooth
    distinct = list(dict.fromkeys(values))
    codes = np.array([distinct.index(value) for value in values])
    same: Array = np.equal.outer(codes, codes).astype(float)
    return same


class Levels:
    """The levels of all candidates, and the correlation of every two levels of a knob."""

    def __init__(self, candidates: Sequence[KnobValues]) -> None:
        columns = {name: [candidate[name] for candidate in candidates] for name in candidates[0]}
        self.names = _modelled_knobs(columns)
        self.values = {name: list(dict.fromkeys(columns[name])) for name in self.names}
        by_knob = [[self.values[name].index(value) for value in columns[name]] for name in self.names]
        self.array: Points = np.array(by_knob, dtype=int).reshape(len(self.names), len(candidates)).T
        self.points: list[tuple[int, ...]] = [tuple(row) for row in self.array.tolist()]
        self._numbers = {point: number for number, point in enumerate(self.points)}
        self._similarities = [similarity(self.values[name], is_smooth=name in SMOOTH_KNOBS) for name in self.names]

    def with_level(self, number: int, name: str, level: int) -> int | None:
        """Return the candidate that differs only by a knob's level and the knobs decided by it; None without one."""
        point = list(self.points[number])
        point[self.names.index(name)] = level
        return self._numbers.get(tuple(point))

    def covariance_parts(self, points: Points, others: Points, weights: Array) -> Array:
        """Return the parts of the prior covariance of every two points, before `Scales` multiply them.

        They are: of the mean; the sum over knobs of the correlations of their levels, each by the square of the knob's
        weight; twice the sum over pairs of knobs of the products of these; 1 if every level is the same.
        """
        totals, squares = np.zeros((2, len(points), len(others)))
        same = np.ones((len(points), len(others)), dtype=bool)
        for table, weight, levels, other_levels in zip(self._similarities, weights, points.T, others.T, strict=True):
            correlations = weight**2 * table[levels][:, other_levels]
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


class Prior(NamedTuple):
    """The expectations before the trials, by candidate and by the names of the `Levels`."""

    log_gains: Array
    """The ln rate of each candidate over the baseline's."""
    weights: Array
    """The deviation of each knob's effect from these gains, as a share of `Scales.main`."""


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

    def covariances(self, parts: Array) -> Array:
        """Return the covariances before any trial, the kernel of the Gaussian process, from their parts."""
        # The pairwise part counts each pair twice.
        weights = (MEAN_VARIANCE, self.main**2, self.pair**2 / 2, (RESIDUAL_SHARE * self.pair) ** 2)
        covariances: Array = np.tensordot(weights, parts, 1)
        return covariances


MIN_SCALED_TRIALS = 8
"""From this number of trials on they choose the scales of the effects."""
MAIN_DEVIATIONS, PAIR_DEVIATIONS, PROCESS_DEVIATIONS = (0.15, 0.3, 0.6), (0.035, 0.08, 0.16), (0.003, 0.01, 0.03, 0.08)
"""The values of each scale to choose from.

Pairs from 0.04 took 13 process starts in 5 % of the small synthetic spaces, now 12; from 0.03 more were 2 % off."""
POSSIBLE_SCALES = [
    Scales(*scales) for scales in itertools.product(MAIN_DEVIATIONS, PAIR_DEVIATIONS, PROCESS_DEVIATIONS)
]
"""Every combination of these."""


class Posterior:
    """Mean and variance of every candidate's ln samples/s, or ln samples a joule, after the trials."""

    def __init__(self, levels: Levels, prior: Prior, measured: Measurements, *, per_joule: bool) -> None:
        self._levels, self._weights = levels, prior.weights
        rates = [(trial, log_rate(trial, per_joule=per_joule)) for trial in measured.trials]
        trials = [trial for trial, rate in rates if rate is not None]
        numbers = np.array([trial.candidate_number for trial in trials], dtype=int)
        values = np.array([rate for _, rate in rates if rate is not None]) - prior.log_gains[numbers]
        # The first rate decides the prior mean.
        center = values[0] if len(values) else 0.0
        points = levels.array[numbers]
        parts = levels.covariance_parts(points, points, prior.weights)
        processes = np.array([trial.run_id for trial in trials])
        same_process = processes[:, None] == processes
        noise = np.diag(np.array([measured.variance(trial) for trial in trials], dtype=float))

        def factor(scales: Scales) -> tuple[Array, Array]:
            """Return the Cholesky factor of the trials' covariance, and the whitened rates."""
            rows = np.linalg.cholesky(scales.covariances(parts) + scales.process**2 * same_process + noise)
            return rows, np.linalg.solve(rows, values - center)

        def log_likelihood(scales: Scales) -> float:
            rows, whitened = factor(scales)
            return float(-np.log(rows.diagonal()).sum() - 0.5 * whitened @ whitened)

        self.scales = max(POSSIBLE_SCALES, key=log_likelihood) if len(values) >= MIN_SCALED_TRIALS else Scales()
        rows, whitened = factor(self.scales)
        # Not `@` or `solve`: the threads of BLAS spin beside a busy process, and made a decision four times as long.
        self._components = np.einsum("ij,jk->ik", np.linalg.inv(rows), self._prior(points))
        self.mean: Array = center + prior.log_gains + whitened @ self._components
        # Every point has the same covariance with itself.
        own_variance = self._prior(levels.array[:1])[0, 0]
        self.variance: Array = np.maximum(own_variance - np.square(self._components).sum(axis=0), 0.0)

    def covariances(self, number: int) -> Array:
        """Return the posterior covariance of a candidate with every candidate."""
        prior: Array = self._prior(self._levels.array[[number]])[0]
        covariances: Array = prior - self._components[:, number] @ self._components
        return covariances

    def _prior(self, points: Points) -> Array:
        """Return the prior covariance of these points with every candidate."""
        return self.scales.covariances(self._levels.covariance_parts(points, self._levels.array, self._weights))


GUESSED_START_S, GUESSED_COMPILATION_S, GUESSED_SWITCH_S = 3.0, 40.0, 0.3
"""Assumed before the first process start, from a standby; the first compilation; and the first warm trial."""


class ProcessStarts:
    """Seconds until a process takes its first timed step, by its key."""

    def __init__(self, lines: Sequence[BestLine]) -> None:
        trials = [line for line in lines if isinstance(line, Trial)]
        first_untimed_s = {trial.run_id: trial.untimed_s for trial in reversed(trials) if not trial.warm}
        starts_s: dict[KnobsKey, list[float]] = defaultdict(list)
        for line in lines:
            if isinstance(line, ProcessReady):
                starts_s[knobs_key(line.process_knobs)].append(line.start_s + first_untimed_s.get(line.run_id, 0.0))
        self._measured_s = {key: statistics.median(seconds) for key, seconds in starts_s.items()}
        self.switch_s = statistics.median([trial.untimed_s for trial in trials if trial.warm] or [GUESSED_SWITCH_S])
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

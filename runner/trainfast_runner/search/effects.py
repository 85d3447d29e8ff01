"""The effects model: ln of the rate as a sum of knob effects, shrunk pairwise terms, a process's effect and noise.

A Gaussian process whose covariance is that sum (Duvenaud, Nickisch and Rasmussen, "Additive Gaussian Processes", 2011).
The posterior over all candidates is exact: by the vector L^-1 k(x) of each candidate x, where L is the Cholesky factor
of the covariance of the observations (Rasmussen and Williams, "Gaussian Processes for Machine Learning", 2.1).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainfast_runner.results.distributions import NORMAL_95
from trainfast_runner.search.best_journal import EarlierEffect
from trainfast_runner.search.measured_speeds import Measurements, log_rate
from trainfast_runner.search.searches import BATCH_KNOBS, MESH_KNOBS
from trainfast_runner.settings.knob_values import KnobValue, KnobValues

Array = NDArray[np.float64]
Point = tuple[int, ...]
"""The level of each modelled knob: the index of its value among the values that the candidates have."""
SMOOTH_KNOBS = frozenset((*BATCH_KNOBS, "seq_len", "workers", "prefetch", "micro_batches", "tp_degree", "pp_degree"))
"""Numeric knobs whose similar values have similar effects."""
LENGTH_SCALE_LOG2 = 1.4
"""Two values of a smooth knob a factor of 2**LENGTH_SCALE_LOG2 apart share exp(-1/2) of their effect.

With 2.0, and pairs from 0.02, a search stopped short in 5 of 100 synthetic spaces, now in 1."""


class Levels:
    """The points of all candidates, and the correlation of every two levels of a knob.

    `weights` scale the prior variance of a knob's effect; 1 for a knob without a weight.
    """

    def __init__(self, candidates: Sequence[KnobValues], weights: Mapping[str, float] | None = None) -> None:
        columns = {name: [_typed(candidate[name]) for candidate in candidates] for name in candidates[0]}
        self.names = _modelled_knobs(columns)
        distinct = {name: list(dict.fromkeys(columns[name])) for name in self.names}
        self.values = {name: [value for _, value in distinct[name]] for name in self.names}
        self._level_of = {name: {key: level for level, key in enumerate(distinct[name])} for name in self.names}
        by_knob = [map(self._level_of[name].__getitem__, columns[name]) for name in self.names]
        self.points: list[Point] = list(zip(*by_knob, strict=True)) or [()] * len(candidates)
        weight_of = weights or {}
        self._correlations = [_correlations(name, self.values[name], weight_of.get(name, 1.0)) for name in self.names]
        self._numbers = {point: number for number, point in enumerate(self.points)}

    def point(self, knobs: KnobValues) -> Point:
        """Return the levels of these knobs. Raises KeyError for a value that no candidate has."""
        return tuple(self._level_of[name][_typed(knobs[name])] for name in self.names)

    def with_level(self, number: int, name: str, level: int) -> int | None:
        """Return the candidate that differs only by a knob's level and the knobs decided by it; None without one."""
        point = list(self.points[number])
        point[self.names.index(name)] = level
        return self._numbers.get(tuple(point))

    def covariance_parts(self, points: Sequence[Point], others: Sequence[Point]) -> Array:
        """Return the parts of the prior covariance of every two points, before `Scales` multiply them.

        They are: of the mean; the sum over knobs of the correlations of their levels; twice the sum over pairs of knobs
        of the products of these; 1 if every level is the same.
        """
        rows, columns = (np.array(each, dtype=int).reshape(len(each), len(self.names)) for each in (points, others))
        totals, squares = np.zeros((2, len(points), len(others)))
        same = np.ones((len(points), len(others)), dtype=bool)
        for table, levels, other_levels in zip(self._correlations, rows.T, columns.T, strict=True):
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


def _correlations(name: str, values: Sequence[object], weight: float) -> Array:
    """Return the correlation of the effects of every two values, times the knob's weight.

    Two numbers of a smooth knob correlate by their distance in log2, two values of another knob do not correlate.
    """
    if name not in SMOOTH_KNOBS or not all(isinstance(value, int | float) for value in values):
        return weight * np.eye(len(values))
    # Zero loader processes are as far from one as one is from two.
    logs = np.array([math.log2(max(float(str(value)), 0.5)) for value in values])
    result: Array = weight * np.exp(-0.5 * ((logs[:, None] - logs) / LENGTH_SCALE_LOG2) ** 2)
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


@dataclass(frozen=True)
class Observation:
    """A measured ln rate, or a difference of two."""

    terms: tuple[tuple[float, Point], ...]
    """The points that were measured, with their weights: 1, or 1 and -1 for a difference."""
    value: float
    variance: float
    """Variance of the measurement's noise."""
    process: str | None = None
    """Run id of the process, whose effect its observations share; None for an observation of no process."""

    def centered_on(self, mean: float) -> float:
        """Return the value less the value expected if every ln rate is `mean`."""
        return self.value - mean * sum(weight for weight, _ in self.terms)


def _terms(observations: Sequence[Observation]) -> tuple[Array, list[Point]]:
    """Return the points of all observations, and the weight of each point in each observation."""
    terms = [(row, weight, point) for row, seen in enumerate(observations) for weight, point in seen.terms]
    weights = np.zeros((len(observations), len(terms)))
    for column, (row, weight, _) in enumerate(terms):
        weights[row, column] = weight
    return weights, [point for _, _, point in terms]


def _prior(parts: Array, scales: Scales) -> Array:
    """Return the covariances before any observation, the kernel of the Gaussian process, from their parts."""
    residual = (RESIDUAL_SHARE * scales.pair) ** 2
    # The pairwise part counts each pair twice.
    covariances: Array = np.tensordot((MEAN_VARIANCE, scales.main**2, scales.pair**2 / 2, residual), parts, 1)
    return covariances


class Factor(NamedTuple):
    """The Cholesky factor of the observations' covariance, and the whitened observations."""

    rows: Array
    whitened: Array


class Likelihood:
    """The likelihood of observations under other scales; the parts of their covariance are computed once.

    `fixed_covariances` are covariances of every two observations that no scale changes.
    """

    def __init__(
        self, levels: Levels, observations: Sequence[Observation], center: float, fixed_covariances: Array | float = 0.0
    ) -> None:
        weights, points = _terms(observations)
        self._parts = weights @ levels.covariance_parts(points, points) @ weights.T
        processes = [seen.process for seen in observations]
        self._same_process = np.array([[one == other is not None for other in processes] for one in processes])
        self._fixed = np.diag([seen.variance for seen in observations]) + fixed_covariances
        self._values = np.array([seen.centered_on(center) for seen in observations])

    def log_likelihood(self, scales: Scales, count: int | None = None) -> float:
        """Return the log of the marginal likelihood, up to a constant, of the first `count` observations or of all."""
        rows, whitened = self.factor(scales, count)
        return float(-np.log(rows.diagonal()).sum() - 0.5 * whitened @ whitened)

    def factor(self, scales: Scales, count: int | None = None) -> Factor:
        """Return the Cholesky factor of the first `count` observations, or of all."""
        covariances = _prior(self._parts, scales) + scales.process**2 * self._same_process + self._fixed
        rows: Array = np.linalg.cholesky(covariances[:count, :count]).astype(np.float64)
        return Factor(rows, np.linalg.solve(rows, self._values[:count]))


class Posterior:
    """Mean and variance of every candidate's ln rate after the observations. `center` is the prior mean."""

    def __init__(self, levels: Levels, scales: Scales, center: float, observations: Sequence[Observation]) -> None:
        self.levels, self.scales = levels, scales
        weights, points = _terms(observations)
        rows, whitened = Likelihood(levels, observations, center).factor(scales)
        self._components = np.linalg.solve(rows, weights @ self._between(points, levels.points))
        self.mean: list[float] = (center + whitened @ self._components).tolist()
        # Every point has the same covariance with itself.
        own_variance = self._between(levels.points[:1], levels.points[:1])[0, 0]
        self.variance: list[float] = (own_variance - np.square(self._components).sum(axis=0)).tolist()
        self._covariances: dict[int, list[float]] = {}

    def covariances(self, number: int) -> list[float]:
        """Return the posterior covariance of a candidate with every candidate."""
        if number not in self._covariances:
            prior = self._between([self.levels.points[number]], self.levels.points)[0]
            self._covariances[number] = (prior - self._components[:, number] @ self._components).tolist()
        return self._covariances[number]

    def _between(self, points: Sequence[Point], others: Sequence[Point]) -> Array:
        return _prior(self.levels.covariance_parts(points, others), self.scales)


EARLIER_SPREAD, EARLIER_ADDED_DEVIATION = 2.0, 0.03
"""Chosen, not measured: factor on the spread of an earlier search's effect, and the deviation added to it, in ln
rate."""
MILESTONES = (8, 12, 17, 24, 33, 46, 64, 90)
"""Numbers of own observations at which the scales of the effects are chosen again."""
MAIN_DEVIATIONS, PAIR_DEVIATIONS, PROCESS_DEVIATIONS = (0.15, 0.3, 0.6), (0.04, 0.08, 0.16), (0.003, 0.01, 0.03, 0.08)
"""The `Scales` to choose from: of effects, of pairwise terms, between processes."""


def fit_effects(
    levels: Levels, measured: Measurements, earlier: Iterable[EarlierEffect], baseline: KnobValues, *, per_joule: bool
) -> Posterior:
    """Return the posterior of ln samples/s, or of ln samples a joule, after the effects of earlier searches and trials.

    `baseline` are the knobs of the baseline.
    """
    earlier_observations = _earlier_observations(levels, earlier, baseline)
    own_observations = [
        Observation(((1.0, levels.points[trial.candidate_number]),), value, measured.variance(trial), trial.run_id)
        for trial in measured.trials
        if (value := log_rate(trial, per_joule=per_joule)) is not None
    ]
    observations = [*earlier_observations, *own_observations]
    center = own_observations[0].value if own_observations else 0.0
    scales, milestone = Scales(), max((number for number in MILESTONES if number <= len(own_observations)), default=0)
    if milestone:
        first_observations = observations[: len(earlier_observations) + milestone]
        scales = _scales(levels, center, first_observations, measured.drift_deviation)
    return Posterior(levels, scales, center, observations)


def _earlier_observations(levels: Levels, effects: Iterable[EarlierEffect], baseline: KnobValues) -> list[Observation]:
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


def _scales(levels: Levels, center: float, observations: Sequence[Observation], min_deviation: float) -> Scales:
    """Return the scales under which the observations are most likely."""
    deviations = [deviation for deviation in PROCESS_DEVIATIONS if deviation >= min_deviation] or [min_deviation]
    score = cache(Likelihood(levels, observations, center).log_likelihood)
    best = Scales(process=min(deviations, key=lambda deviation: abs(deviation - Scales().process)))
    for _ in range(2):
        best = max((replace(best, main=main) for main in MAIN_DEVIATIONS), key=score)
        best = max((replace(best, pair=pair) for pair in PAIR_DEVIATIONS), key=score)
        best = max((replace(best, process=deviation) for deviation in deviations), key=score)
    return best

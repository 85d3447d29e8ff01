"""The effects model: ln of the rate as a sum of knob effects, shrunk pairwise terms, a process's effect and noise.

A Gaussian process whose covariance is that sum (Duvenaud, Nickisch and Rasmussen, "Additive Gaussian Processes", 2011).
The posterior over all candidates is exact: for each candidate x the vector L^-1 k(x) is kept, where L is the Cholesky
factor of the covariance of the observations (Rasmussen and Williams, "Gaussian Processes for Machine Learning",
algorithm 2.1), and each observation extends it by one component.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import add, mul
from typing import NamedTuple

from trainfast_runner.search.searches import BATCH_KNOBS, MESH_KNOBS
from trainfast_runner.settings.knob_values import KnobValues

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
        self.names = _modelled_knobs(candidates)
        self.values = {name: list(dict.fromkeys(candidate[name] for candidate in candidates)) for name in self.names}
        self._level_of = {
            name: {_typed_key(value): level for level, value in enumerate(self.values[name])} for name in self.names
        }
        self.points: list[Point] = [self.point(candidate) for candidate in candidates]
        weight_of = weights or {}
        self.correlations = [_correlations(name, self.values[name], weight_of.get(name, 1.0)) for name in self.names]
        """By knob, level and other level."""
        self.columns = [[point[index] for point in self.points] for index in range(len(self.names))]
        """The levels of all candidates, by knob."""
        self.numbers = {point: number for number, point in enumerate(self.points)}
        """The number of the candidate at a point."""
        middle = len(self.names) // 2
        self._halves = [_Half(self, range(middle)), _Half(self, range(middle, len(self.names)))]
        self._sums: dict[Point, tuple[list[float], list[float]]] = {}

    def point(self, knobs: KnobValues) -> Point:
        """Return the levels of these knobs. Raises KeyError for a value that no candidate has."""
        return tuple(self._level_of[name][_typed_key(knobs[name])] for name in self.names)

    def with_level(self, number: int, name: str, level: int) -> int | None:
        """Return the candidate that differs only by a knob's level and the knobs decided by it; None without one."""
        point = list(self.points[number])
        point[self.names.index(name)] = level
        return self.numbers.get(tuple(point))

    def correlation_sums(self, point: Point) -> tuple[list[float], list[float]]:
        """Return each candidate's correlation with a point: its sum over knobs, and twice that over pairs of knobs.

        The sums of every point are cached, because new scales need them again.
        """
        if point not in self._sums:
            (left_sums, left_squares), (right_sums, right_squares) = (
                half.correlation_sums(point) for half in self._halves
            )
            left, right = (half.point_indices for half in self._halves)
            sums = [left_sums[low] + right_sums[high] for low, high in zip(left, right, strict=True)]
            # Twice the sum over pairs of products is the square of the sum without the squares.
            pairs = [
                total * total - left_squares[low] - right_squares[high]
                for total, low, high in zip(sums, left, right, strict=True)
            ]
            self._sums[point] = sums, pairs
        return self._sums[point]


class _Half:
    """Half of the knobs: the distinct points of the candidates in that half, and each candidate's index among them.

    Thousands of candidates have few distinct points of half the knobs, so the correlations of a point are summed once.
    """

    def __init__(self, levels: Levels, knob_indices: range) -> None:
        self._knob_indices, self._correlations = knob_indices, levels.correlations
        points = [point[knob_indices.start : knob_indices.stop] for point in levels.points]
        self._points = list(dict.fromkeys(points))
        index_of = {point: index for index, point in enumerate(self._points)}
        self.point_indices = [index_of[point] for point in points]

    def correlation_sums(self, point: Point) -> tuple[list[float], list[float]]:
        """Return, by distinct point, the sum over these knobs of correlations with `point`, and of their squares."""
        tables = [self._correlations[index][point[index]] for index in self._knob_indices]
        rows = [[table[level] for table, level in zip(tables, distinct, strict=True)] for distinct in self._points]
        return [sum(row) for row in rows], [sum(map(mul, row, row)) for row in rows]


def _modelled_knobs(candidates: Sequence[KnobValues]) -> list[str]:
    """Return the knobs that have several values, without a batch or accumulation that the other knobs decide."""
    names = [name for name in candidates[0] if len({_typed_key(candidate[name]) for candidate in candidates}) > 1]
    for derived in reversed(BATCH_KNOBS):
        others = [name for name in names if name in (*BATCH_KNOBS, *MESH_KNOBS) and name != derived]
        if derived in names:
            decided = {tuple(_typed_key(candidate[name]) for name in (*others, derived)) for candidate in candidates}
            if len(decided) == len({key[:-1] for key in decided}):
                names.remove(derived)
    return names


def _correlations(name: str, values: Sequence[object], weight: float) -> list[list[float]]:
    """Return the correlation of the effects of every two values, times the knob's weight.

    Two numbers of a smooth knob correlate by their distance in log2, two values of another knob do not correlate.
    """
    if name not in SMOOTH_KNOBS or not all(isinstance(value, int | float) for value in values):
        return [[weight if column == row else 0.0 for column in range(len(values))] for row in range(len(values))]
    # Zero loader processes are as far from one as one is from two.
    logs = [math.log2(max(float(str(value)), 0.5)) for value in values]
    return [[weight * math.exp(-0.5 * ((log - other) / LENGTH_SCALE_LOG2) ** 2) for other in logs] for log in logs]


def _typed_key(value: object) -> tuple[str, object]:
    """Return a key that is equal only for equal values of the same type: 1 is not 1.0, nor True."""
    return type(value).__name__, value


MEAN_VARIANCE = 4.0
"""Prior variance of the mean of ln rate, large because the mean is unknown."""
RESIDUAL_SHARE = 0.5
"""Standard deviation of the residual, as a share of that of the pairwise terms."""
MIN_VARIANCE = 1e-12
"""Variance at least: rounding can leave the square of a diagonal at zero or below."""


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


class CovarianceParts(NamedTuple):
    """The parts of the prior covariance of two observations, before `Scales` multiply them."""

    mean: float
    knobs: float
    """Sum of the correlations of their levels, over knobs."""
    pairs: float
    """Twice the sum of the products of these correlations, over pairs of knobs."""
    all_knobs: float
    """1 if every level is the same."""
    process: float
    """1 if both are of one process."""


def covariance_parts(levels: Levels, observation: Observation, other: Observation) -> CovarianceParts:
    """Return the parts of two observations: those of their points, weighted, and 1 if both are of one process."""
    mean = knobs = pairs = all_knobs = 0.0
    for weight, point in observation.terms:
        for other_weight, other_point in other.terms:
            parts = _parts_of_points(levels, point, other_point)
            product = weight * other_weight
            mean += product * parts.mean
            knobs += product * parts.knobs
            pairs += product * parts.pairs
            all_knobs += product * parts.all_knobs
    same_process = observation.process is not None and observation.process == other.process
    return CovarianceParts(mean, knobs, pairs, all_knobs, 1.0 if same_process else 0.0)


def _parts_of_points(levels: Levels, point: Point, other: Point) -> CovarianceParts:
    correlations = [
        table[level][other_level] for table, level, other_level in zip(levels.correlations, point, other, strict=True)
    ]
    total: float = sum(correlations)
    squares: float = sum(map(mul, correlations, correlations))
    return CovarianceParts(1.0, total, total * total - squares, 1.0 if point == other else 0.0, 0.0)


class PriorCovariance:
    """The covariance of ln rate between points before any observation: the kernel of the Gaussian process."""

    def __init__(self, levels: Levels, scales: Scales) -> None:
        self._levels = levels
        # `pairs` counts each pair twice.
        self._main, self._pair = scales.main**2, scales.pair**2 / 2
        self._residual = (RESIDUAL_SHARE * scales.pair) ** 2
        self._process = scales.process**2

    def from_parts(self, parts: Sequence[CovarianceParts]) -> list[float]:
        """Return the covariance of every pair of observations by its parts."""
        main, pair, residual, process = self._main, self._pair, self._residual, self._process
        return [
            MEAN_VARIANCE * mean + main * total + pair * products + residual * equal + process * same
            for mean, total, products, equal, same in parts
        ]

    def with_candidates(self, point: Point) -> list[float]:
        """Return the covariance of a point with every candidate."""
        levels, main, pair = self._levels, self._main, self._pair
        totals, pairs = levels.correlation_sums(point)
        covariances = [
            MEAN_VARIANCE + main * total + pair * products for total, products in zip(totals, pairs, strict=True)
        ]
        if (number := levels.numbers.get(point)) is not None:
            covariances[number] += self._residual
        return covariances


class FactorRow(NamedTuple):
    """The row of the Cholesky factor that an observation adds, its diagonal apart, and its whitened value."""

    row: list[float]
    diagonal: float
    whitened: float


class Factor:
    """The Cholesky factor of the observations' covariance, a row at a time, and the whitened observations."""

    def __init__(self) -> None:
        self.rows: list[list[float]] = []
        self.diagonal: list[float] = []
        self.whitened: list[float] = []

    def add(self, covariances: Sequence[float], own_variance: float, value: float) -> FactorRow:
        """Add a value by its covariances with the earlier values and its own variance; return the new row."""
        row: list[float] = []
        for covariance, earlier_row, diagonal in zip(covariances, self.rows, self.diagonal, strict=True):
            row.append((covariance - sum(map(mul, earlier_row, row))) / diagonal)
        diagonal = math.sqrt(max(own_variance - sum(map(mul, row, row)), MIN_VARIANCE))
        whitened = (value - sum(map(mul, row, self.whitened))) / diagonal
        self.rows.append(row)
        self.diagonal.append(diagonal)
        self.whitened.append(whitened)
        return FactorRow(row, diagonal, whitened)

    @property
    def log_likelihood(self) -> float:
        """The log of the marginal likelihood of the values, up to a constant."""
        squares: float = sum(map(mul, self.whitened, self.whitened))
        return -sum(map(math.log, self.diagonal)) - 0.5 * squares


class Posterior:
    """Mean and variance of every candidate's ln rate after the observations. `center` is the prior mean."""

    def __init__(self, levels: Levels, scales: Scales, center: float) -> None:
        self.levels, self.scales, self.center = levels, scales, center
        self.observations: list[Observation] = []
        self._prior, self._factor = PriorCovariance(levels, scales), Factor()
        self.mean = [center] * len(levels.points)
        # Every point has the same covariance with itself.
        point = levels.points[0]
        self.variance = self._prior.from_parts([_parts_of_points(levels, point, point)]) * len(levels.points)
        self._vectors: list[list[float]] = [[] for _ in levels.points]
        self._cached_number: int | None = None
        self._cached_covariances: list[float] = []

    def add(self, observation: Observation) -> None:
        """Add an observation: every candidate's vector gets one component, and its mean and variance change."""
        self.observations.append(observation)
        parts = [covariance_parts(self.levels, observation, other) for other in self.observations]
        *covariances, own_variance = self._prior.from_parts(parts)
        value = observation.centered_on(self.center)
        row, diagonal, whitened = self._factor.add(covariances, own_variance + observation.variance, value)
        components = [
            (covariance - sum(map(mul, row, vector))) / diagonal
            for covariance, vector in zip(self._with_candidates(observation), self._vectors, strict=True)
        ]
        for vector, component in zip(self._vectors, components, strict=True):
            vector.append(component)
        self.mean = [mean + component * whitened for mean, component in zip(self.mean, components, strict=True)]
        self.variance = [
            variance - component * component for variance, component in zip(self.variance, components, strict=True)
        ]
        if self._cached_number is not None:
            cached = components[self._cached_number]
            self._cached_covariances = [
                covariance - cached * component
                for covariance, component in zip(self._cached_covariances, components, strict=True)
            ]

    def _with_candidates(self, observation: Observation) -> list[float]:
        """Return the prior covariance of an observation with every candidate."""
        (weight, point), *others = observation.terms
        covariances = [weight * covariance for covariance in self._prior.with_candidates(point)]
        for weight, point in others:
            added_covariances = self._prior.with_candidates(point)
            covariances = [
                total + weight * covariance for total, covariance in zip(covariances, added_covariances, strict=True)
            ]
        return covariances

    def covariances(self, number: int) -> list[float]:
        """Return the posterior covariance of a candidate with every candidate; the last call's is cached."""
        if number != self._cached_number:
            vector = self._vectors[number]
            prior = self._prior.with_candidates(self.levels.points[number])
            self._cached_covariances = [
                covariance - sum(map(mul, vector, other))
                for covariance, other in zip(prior, self._vectors, strict=True)
            ]
            self._cached_number = number
        return self._cached_covariances


class Likelihood:
    """The likelihood of observations under other scales; their parts are computed once.

    `fixed_covariances` are covariances that no scale changes: one row per observation, with every earlier observation
    and with itself.
    """

    def __init__(
        self,
        levels: Levels,
        observations: Sequence[Observation],
        center: float,
        fixed_covariances: Sequence[Sequence[float]] | None = None,
    ) -> None:
        self._levels, self._fixed_covariances = levels, fixed_covariances
        self._values = [(observation.centered_on(center), observation.variance) for observation in observations]
        self._parts = [
            [covariance_parts(levels, observation, earlier) for earlier in observations[: index + 1]]
            for index, observation in enumerate(observations)
        ]

    def log_likelihood(self, scales: Scales, count: int | None = None) -> float:
        """Return the log of the marginal likelihood, up to a constant, of the first `count` observations or of all."""
        return self.factor(scales, count).log_likelihood

    def factor(self, scales: Scales, count: int | None = None) -> Factor:
        """Return the Cholesky factor of the first `count` observations, or of all."""
        prior, factor = PriorCovariance(self._levels, scales), Factor()
        for number, (row, (value, variance)) in enumerate(zip(self._parts[:count], self._values, strict=False)):
            *covariances, own_variance = prior.from_parts(row)
            if self._fixed_covariances is not None:
                *covariances, own_variance = map(add, (*covariances, own_variance), self._fixed_covariances[number])
            factor.add(covariances, own_variance + variance, value)
        return factor

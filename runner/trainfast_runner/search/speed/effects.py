"""The effects model: ln of the rate as a sum of knob effects, shrunk pairwise terms, a visit's effect and noise.

A Gaussian process whose covariance is that sum (Duvenaud, Nickisch and Rasmussen, "Additive Gaussian Processes", 2011).
The posterior over all candidates is exact: for each candidate x the vector L^-1 k(x) is kept, where L is the Cholesky
factor of the covariance of the observations (Rasmussen and Williams, "Gaussian Processes for Machine Learning",
algorithm 2.1), and each observation extends it by one component.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import mul
from typing import NamedTuple

from trainfast_runner.records.run_file import RecordedKnobs
from trainfast_runner.search.candidate_spec import BATCH_KNOBS, MESH

Point = tuple[int, ...]
"""A candidate as the effects model sees it: the level of each modelled knob."""
SMOOTH = frozenset((*BATCH_KNOBS, "seq_len", "workers", "prefetch", "micro_batches", "tp_degree", "pp_degree"))
"""Numeric knobs whose near values have near effects."""
LENGTH = 1.4
"""Two values of a smooth knob a factor of 2**LENGTH apart share exp(-1/2) of their effect."""
MEAN_VARIANCE = 4.0
"""The mean of ln rate is as good as unknown."""
RESIDUAL_SHARE = 0.5
"""Standard deviation of the residual, as a share of that of the pairwise terms."""


@dataclass(frozen=True)
class Scales:
    """Prior standard deviations, in ln rate: of a knob's effect, of a pairwise term, between visits."""

    main: float = 0.3
    pair: float = 0.08
    visit: float = 0.01


class CovarianceParts(NamedTuple):
    """The parts of the covariance of two observations, each before its scale."""

    mean: float
    knobs: float
    """Sum of the correlations of their levels, over knobs."""
    pairs: float
    """Twice the sum of the products of these correlations, over pairs of knobs."""
    all_knobs: float
    """1 if every level is the same."""
    visit: float
    """1 if both are of one visit."""


@dataclass(frozen=True)
class Observation:
    """A measured ln rate (or a difference of two): `terms` are points with their weights.

    `variance` is that of its noise. Observations of one `visit` share its effect; None is outside every visit.
    """

    terms: tuple[tuple[float, Point], ...]
    value: float
    variance: float
    visit: str | None = None


class Levels:
    """The candidates as points: the modelled knobs, their levels, and the correlation of each two levels.

    `weights` multiply the prior variance of a knob's effect, 1 for a knob without one.
    """

    def __init__(self, candidates: Sequence[RecordedKnobs], weights: Mapping[str, float] | None = None) -> None:
        self.names = _modelled(candidates)
        self.values = {name: list(dict.fromkeys(candidate[name] for candidate in candidates)) for name in self.names}
        self._level_of = {
            name: {_typed_key(value): level for level, value in enumerate(self.values[name])} for name in self.names
        }
        self.points: list[Point] = [self.point(candidate) for candidate in candidates]
        weight = (weights or {}).get
        self.correlations = [_correlations(name, self.values[name], weight(name, 1.0)) for name in self.names]
        self.columns = [[point[knob] for point in self.points] for knob in range(len(self.names))]
        self.numbers = {point: number for number, point in enumerate(self.points)}
        middle = len(self.names) // 2
        self._halves = [_Half(self, range(middle)), _Half(self, range(middle, len(self.names)))]
        self._sums: dict[Point, tuple[list[float], list[float]]] = {}

    def point(self, knobs: RecordedKnobs) -> Point:
        """The levels of these knobs. Raises KeyError for a value that no candidate has."""
        return tuple(self._level_of[name][_typed_key(knobs[name])] for name in self.names)

    def correlation_sums(self, point: Point) -> tuple[list[float], list[float]]:
        """Each candidate's correlation with a point: summed over knobs, and twice the sum over pairs of knobs.

        Kept for each point asked for, because new scales need them again.
        """
        if point not in self._sums:
            (left_sums, left_squares), (right_sums, right_squares) = (
                half.correlation_sums(point) for half in self._halves
            )
            left, right = (half.indices for half in self._halves)
            sums = [left_sums[low] + right_sums[high] for low, high in zip(left, right, strict=True)]
            pairs = [
                total * total - left_squares[low] - right_squares[high]
                for total, low, high in zip(sums, left, right, strict=True)
            ]
            self._sums[point] = sums, pairs
        return self._sums[point]

    def with_level(self, number: int, name: str, level: int) -> int | None:
        """The candidate that differs only by a knob's level, and by knobs that this level decides; None without one."""
        point = list(self.points[number])
        point[self.names.index(name)] = level
        return self.numbers.get(tuple(point))


class _Half:
    """Half of the knobs: its few different points, and the index of each candidate's among them.

    Thousands of candidates have few different points of half the knobs, so the correlations of each are summed once.
    """

    def __init__(self, levels: Levels, knobs: range) -> None:
        self._knobs, self._correlations = knobs, levels.correlations
        points = [point[knobs.start : knobs.stop] for point in levels.points]
        self._points = list(dict.fromkeys(points))
        index_of = {point: index for index, point in enumerate(self._points)}
        self.indices = [index_of[point] for point in points]

    def correlation_sums(self, point: Point) -> tuple[list[float], list[float]]:
        """Sum and sum of squares, over these knobs, of the correlations of a point with each different one."""
        tables = [self._correlations[knob][point[knob]] for knob in self._knobs]
        same = [[table[level] for table, level in zip(tables, point, strict=True)] for point in self._points]
        return [sum(row) for row in same], [sum(map(mul, row, row)) for row in same]


class PriorCovariance:
    """The covariance of ln rate between points before any observation: the kernel of the Gaussian process."""

    def __init__(self, levels: Levels, scales: Scales) -> None:
        self._levels = levels
        # The sum over pairs of products is half the square of the sum without the squares.
        self._main, self._pair = scales.main**2, scales.pair**2 / 2
        self._residual = (RESIDUAL_SHARE * scales.pair) ** 2
        self._visit = scales.visit**2

    def between(self, point: Point, other: Point) -> float:
        """The covariance of two points."""
        (covariance,) = self.covariances([CovarianceParts(*parts_between(self._levels, point, other), 0.0)])
        return covariance

    def covariances(self, pairs: Sequence[CovarianceParts]) -> list[float]:
        """The covariance of each two observations."""
        main, pair, residual, visit = self._main, self._pair, self._residual, self._visit
        return [
            MEAN_VARIANCE * mean + main * total + pair * products + residual * equal + visit * same
            for mean, total, products, equal, same in pairs
        ]

    def with_candidates(self, point: Point) -> list[float]:
        """The covariance of a point with every candidate."""
        levels, main, pair = self._levels, self._main, self._pair
        totals, pairs = levels.correlation_sums(point)
        variances = [
            MEAN_VARIANCE + main * total + pair * products for total, products in zip(totals, pairs, strict=True)
        ]
        if (number := levels.numbers.get(point)) is not None:
            variances[number] += self._residual
        return variances


def parts_between(levels: Levels, point: Point, other: Point) -> tuple[float, float, float, float]:
    """The first four `CovarianceParts` of two points."""
    same = [table[left][right] for table, left, right in zip(levels.correlations, point, other, strict=True)]
    total: float = sum(same)
    squares: float = sum(map(mul, same, same))
    return 1.0, total, total * total - squares, 1.0 if point == other else 0.0


def covariance_parts(levels: Levels, observation: Observation, other: Observation) -> CovarianceParts:
    """The parts of two observations: those of their points by weight, and the visit."""
    sums = [0.0, 0.0, 0.0, 0.0]
    for weight, point in observation.terms:
        for other_weight, other_point in other.terms:
            parts = parts_between(levels, point, other_point)
            sums = [so_far + weight * other_weight * part for so_far, part in zip(sums, parts, strict=True)]
    mean, knobs, pairs, all_knobs = sums
    return CovarianceParts(
        mean,
        knobs,
        pairs,
        all_knobs,
        1.0 if observation.visit is not None and observation.visit == other.visit else 0.0,
    )


class Factor:
    """The Cholesky factor of the observations' covariance, a row at a time, and the whitened observations."""

    def __init__(self) -> None:
        self.rows: list[list[float]] = []
        self.diagonal: list[float] = []
        self.whitened: list[float] = []

    def add(self, covariances: Sequence[float], own_variance: float, value: float) -> tuple[list[float], float, float]:
        """Add a value with its covariances with those before and its own variance.

        Return its row without the diagonal, the diagonal and the whitened value.
        """
        row: list[float] = []
        for covariance, known, diagonal in zip(covariances, self.rows, self.diagonal, strict=True):
            row.append((covariance - sum(map(mul, known, row))) / diagonal)
        diagonal = math.sqrt(max(own_variance - sum(map(mul, row, row)), 1e-12))
        whitened = (value - sum(map(mul, row, self.whitened))) / diagonal
        self.rows.append(row)
        self.diagonal.append(diagonal)
        self.whitened.append(whitened)
        return row, diagonal, whitened

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
        # Every point is equally near to itself.
        self.variance = [self._prior.between(point, point) for point in levels.points[:1]] * len(levels.points)
        self._vectors: list[list[float]] = [[] for _ in levels.points]
        self._cached_candidate: int | None = None
        self._cached_column: list[float] = []

    def add(self, observation: Observation) -> None:
        """Take one more observation into account."""
        self.observations.append(observation)
        parts = [covariance_parts(self.levels, observation, other) for other in self.observations]
        *covariances, own_variance = self._prior.covariances(parts)
        value = _centered(observation, self.center)
        row, diagonal, whitened = self._factor.add(covariances, own_variance + observation.variance, value)
        (weight, point), *others = observation.terms
        column = [weight * covariance for covariance in self._prior.with_candidates(point)]
        for weight, point in others:
            added = self._prior.with_candidates(point)
            column = [so_far + weight * covariance for so_far, covariance in zip(column, added, strict=True)]
        components = [
            (covariance - sum(map(mul, row, vector))) / diagonal
            for covariance, vector in zip(column, self._vectors, strict=True)
        ]
        for vector, component in zip(self._vectors, components, strict=True):
            vector.append(component)
        self.mean = [mean + component * whitened for mean, component in zip(self.mean, components, strict=True)]
        self.variance = [
            variance - component * component for variance, component in zip(self.variance, components, strict=True)
        ]
        if self._cached_candidate is not None:
            cached = components[self._cached_candidate]
            self._cached_column = [
                covariance - cached * component
                for covariance, component in zip(self._cached_column, components, strict=True)
            ]

    def covariances(self, candidate: int) -> list[float]:
        """The posterior covariance of a candidate with every candidate; kept for the candidate of the last call."""
        if candidate != self._cached_candidate:
            vector = self._vectors[candidate]
            column = self._prior.with_candidates(self.levels.points[candidate])
            self._cached_column = [
                covariance - sum(map(mul, vector, other))
                for covariance, other in zip(column, self._vectors, strict=True)
            ]
            self._cached_candidate = candidate
        return self._cached_column

    def difference(self, number: int, other: int) -> tuple[float, float]:
        """The mean and variance of the ln rate of candidate `number` less that of `other`."""
        between = self._prior.between(self.levels.points[number], self.levels.points[other])
        covariance = between - sum(map(mul, self._vectors[number], self._vectors[other]))
        variance = self.variance[number] + self.variance[other] - 2 * covariance
        return self.mean[number] - self.mean[other], max(variance, 0.0)


class Likelihood:
    """The likelihood of observations under other scales; their parts are computed once."""

    def __init__(self, levels: Levels, observations: Sequence[Observation], center: float) -> None:
        self._levels = levels
        self._values = [(_centered(observation, center), observation.variance) for observation in observations]
        self._parts = [
            [covariance_parts(levels, observation, earlier) for earlier in observations[: index + 1]]
            for index, observation in enumerate(observations)
        ]

    def log_of(self, scales: Scales) -> float:
        """The log of the marginal likelihood, up to a constant."""
        prior, factor = PriorCovariance(self._levels, scales), Factor()
        for row, (value, variance) in zip(self._parts, self._values, strict=True):
            *covariances, own_variance = prior.covariances(row)
            factor.add(covariances, own_variance + variance, value)
        return factor.log_likelihood


def _centered(observation: Observation, center: float) -> float:
    return observation.value - center * sum(weight for weight, _ in observation.terms)


def _modelled(candidates: Sequence[RecordedKnobs]) -> list[str]:
    """The knobs that have several values, without accumulation or batch where the other one and strategy decide it."""
    names = [name for name in candidates[0] if len({_typed_key(candidate[name]) for candidate in candidates}) > 1]
    for derived in reversed(BATCH_KNOBS):
        others = [name for name in names if name in (*BATCH_KNOBS, *MESH) and name != derived]
        if derived in names:
            decided = {tuple(_typed_key(candidate[name]) for name in (*others, derived)) for candidate in candidates}
            if len(decided) == len({key[:-1] for key in decided}):
                names.remove(derived)
    return names


def _correlations(name: str, values: Sequence[object], weight: float) -> list[list[float]]:
    """The correlation of the effects of each two values, times the knob's weight: smooth in log2 for numbers, none for
    different names."""
    if name not in SMOOTH or not all(isinstance(value, int | float) for value in values):
        return [[weight if column == row else 0.0 for column in range(len(values))] for row in range(len(values))]
    # Zero, as of loader processes, is as far from one as one is from two.
    logs = [math.log2(max(float(str(value)), 0.5)) for value in values]
    return [[weight * math.exp(-0.5 * ((log - other) / LENGTH) ** 2) for other in logs] for log in logs]


def _typed_key(value: object) -> tuple[str, object]:
    """A value that is equal only to one of the same type: 1 is not 1.0, nor True."""
    return type(value).__name__, value

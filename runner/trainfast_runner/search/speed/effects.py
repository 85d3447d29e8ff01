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

from trainfast_runner.search.candidate_spec import BATCH_KNOBS, MESH
from trainfast_runner.search.journal.best import RecordedKnobs

KnobLevels = tuple[int, ...]
"""The level of each modelled knob of a candidate."""
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
    """A measured ln rate (or a difference of two): `terms` are settings with their weights.

    `variance` is that of its noise. Observations of one `visit` share its effect; None is outside every visit.
    """

    terms: tuple[tuple[float, KnobLevels], ...]
    value: float
    variance: float
    visit: str | None = None


class Levels:
    """The candidates as settings: the modelled knobs, their levels, and the correlation of each two levels.

    `weights` multiply the prior variance of a knob's effect, 1 for a knob without one.
    """

    def __init__(self, candidates: Sequence[RecordedKnobs], weights: Mapping[str, float] | None = None) -> None:
        self.names = _modelled(candidates)
        self.values = {name: list(dict.fromkeys(candidate[name] for candidate in candidates)) for name in self.names}
        self._level_of = {
            name: {_key(value): level for level, value in enumerate(self.values[name])} for name in self.names
        }
        self.settings: list[KnobLevels] = [self.setting(candidate) for candidate in candidates]
        weight = (weights or {}).get
        self.correlations = [_correlations(name, self.values[name], weight(name, 1.0)) for name in self.names]
        self.columns = [[setting[knob] for setting in self.settings] for knob in range(len(self.names))]
        self.numbers = {setting: number for number, setting in enumerate(self.settings)}
        middle = len(self.names) // 2
        self._halves = [_Half(self, range(middle)), _Half(self, range(middle, len(self.names)))]
        self._sums: dict[KnobLevels, tuple[list[float], list[float]]] = {}

    def setting(self, knobs: RecordedKnobs) -> KnobLevels:
        """The levels of these knobs. Raises KeyError for a value that no candidate has."""
        return tuple(self._level_of[name][_key(knobs[name])] for name in self.names)

    def correlation_sums(self, setting: KnobLevels) -> tuple[list[float], list[float]]:
        """Each candidate's correlation with a setting: summed over knobs, and twice the sum over pairs of knobs.

        Kept for each setting asked for, because new scales need them again.
        """
        if setting not in self._sums:
            (left_sums, left_squares), (right_sums, right_squares) = (
                half.correlation_sums(setting) for half in self._halves
            )
            left, right = (half.indices for half in self._halves)
            sums = [left_sums[one] + right_sums[two] for one, two in zip(left, right, strict=True)]
            pairs = [
                total * total - left_squares[one] - right_squares[two]
                for total, one, two in zip(sums, left, right, strict=True)
            ]
            self._sums[setting] = sums, pairs
        return self._sums[setting]

    def with_level(self, number: int, name: str, level: int) -> int | None:
        """The candidate that differs only by a knob's level, and by knobs that this level decides; None without one."""
        setting = list(self.settings[number])
        setting[self.names.index(name)] = level
        return self.numbers.get(tuple(setting))


class _Half:
    """Half of the knobs: its few different settings, and the index of each candidate's among them.

    Thousands of candidates have few different settings of half the knobs, so the correlations of each are summed once.
    """

    def __init__(self, levels: Levels, knobs: range) -> None:
        self._knobs, self._correlations = knobs, levels.correlations
        settings = [setting[knobs.start : knobs.stop] for setting in levels.settings]
        self._settings = list(dict.fromkeys(settings))
        index_of = {setting: index for index, setting in enumerate(self._settings)}
        self.indices = [index_of[setting] for setting in settings]

    def correlation_sums(self, setting: KnobLevels) -> tuple[list[float], list[float]]:
        """Sum and sum of squares, over these knobs, of the correlations of a setting with each different one."""
        tables = [self._correlations[knob][setting[knob]] for knob in self._knobs]
        same = [[table[level] for table, level in zip(tables, setting, strict=True)] for setting in self._settings]
        return [sum(row) for row in same], [sum(map(mul, row, row)) for row in same]


class PriorCovariance:
    """The covariance of ln rate between settings before any observation: the kernel of the Gaussian process."""

    def __init__(self, levels: Levels, scales: Scales) -> None:
        self._levels = levels
        # The sum over pairs of products is half the square of the sum without the squares.
        self._main, self._pair = scales.main**2, scales.pair**2 / 2
        self._residual = (RESIDUAL_SHARE * scales.pair) ** 2
        self._visit = scales.visit**2

    def between(self, one: KnobLevels, other: KnobLevels) -> float:
        """The covariance of two settings."""
        (covariance,) = self.of_parts([CovarianceParts(*parts_between(self._levels, one, other), 0.0)])
        return covariance

    def of_parts(self, pairs: Sequence[CovarianceParts]) -> list[float]:
        """The covariance of each two observations."""
        main, pair, residual, visit = self._main, self._pair, self._residual, self._visit
        return [
            MEAN_VARIANCE * mean + main * total + pair * products + residual * equal + visit * same
            for mean, total, products, equal, same in pairs
        ]

    def with_candidates(self, setting: KnobLevels) -> list[float]:
        """The covariance of a setting with every candidate."""
        levels, main, pair = self._levels, self._main, self._pair
        totals, pairs = levels.correlation_sums(setting)
        variances = [MEAN_VARIANCE + main * one + pair * two for one, two in zip(totals, pairs, strict=True)]
        if (number := levels.numbers.get(setting)) is not None:
            variances[number] += self._residual
        return variances


def parts_between(levels: Levels, one: KnobLevels, other: KnobLevels) -> tuple[float, float, float, float]:
    """The first four `CovarianceParts` of two settings."""
    same = [table[left][right] for table, left, right in zip(levels.correlations, one, other, strict=True)]
    total: float = sum(same)
    squares: float = sum(map(mul, same, same))
    return 1.0, total, total * total - squares, 1.0 if one == other else 0.0


def covariance_parts(levels: Levels, observation: Observation, other: Observation) -> CovarianceParts:
    """The parts of two observations: those of their settings by weight, and the visit."""
    sums = [0.0, 0.0, 0.0, 0.0]
    for left, mine in observation.terms:
        for right, theirs in other.terms:
            weight = left * right
            parts = parts_between(levels, mine, theirs)
            sums = [so_far + weight * part for so_far, part in zip(sums, parts, strict=True)]
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
        self.mean = [center] * len(levels.settings)
        # Every setting is equally near to itself.
        self.variance = [self._prior.between(setting, setting) for setting in levels.settings[:1]] * len(
            levels.settings
        )
        self._vectors: list[list[float]] = [[] for _ in levels.settings]
        self._cached_candidate: int | None = None
        self._cached_column: list[float] = []

    def add(self, observation: Observation) -> None:
        """Take one more observation into account."""
        self.observations.append(observation)
        parts = [covariance_parts(self.levels, observation, other) for other in self.observations]
        *covariances, own_variance = self._prior.of_parts(parts)
        value = _centered(observation, self.center)
        row, diagonal, whitened = self._factor.add(covariances, own_variance + observation.variance, value)
        (weight, setting), *others = observation.terms
        column = [weight * covariance for covariance in self._prior.with_candidates(setting)]
        for weight, setting in others:
            added = self._prior.with_candidates(setting)
            column = [one + weight * other for one, other in zip(column, added, strict=True)]
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
            column = self._prior.with_candidates(self.levels.settings[candidate])
            self._cached_column = [
                covariance - sum(map(mul, vector, other))
                for covariance, other in zip(column, self._vectors, strict=True)
            ]
            self._cached_candidate = candidate
        return self._cached_column

    def difference(self, one: int, other: int) -> tuple[float, float]:
        """The mean and variance of the ln rate of `one` less that of `other`."""
        between = self._prior.between(self.levels.settings[one], self.levels.settings[other])
        covariance = between - sum(map(mul, self._vectors[one], self._vectors[other]))
        variance = self.variance[one] + self.variance[other] - 2 * covariance
        return self.mean[one] - self.mean[other], max(variance, 0.0)


class Likelihood:
    """The likelihood of observations under other scales; their parts are computed once."""

    def __init__(self, levels: Levels, observations: Sequence[Observation], center: float) -> None:
        self._levels = levels
        self._values = [(_centered(observation, center), observation.variance) for observation in observations]
        self._parts = [
            [covariance_parts(levels, one, other) for other in observations[: index + 1]]
            for index, one in enumerate(observations)
        ]

    def log_of(self, scales: Scales) -> float:
        """The log of the marginal likelihood, up to a constant."""
        prior, factor = PriorCovariance(self._levels, scales), Factor()
        for row, (value, variance) in zip(self._parts, self._values, strict=True):
            *covariances, own_variance = prior.of_parts(row)
            factor.add(covariances, own_variance + variance, value)
        return factor.log_likelihood


def _centered(observation: Observation, center: float) -> float:
    return observation.value - center * sum(weight for weight, _ in observation.terms)


def _modelled(candidates: Sequence[RecordedKnobs]) -> list[str]:
    """The knobs that have several values, without accumulation or batch where the other one and strategy decide it."""
    names = [name for name in candidates[0] if len({_key(candidate[name]) for candidate in candidates}) > 1]
    for derived in reversed(BATCH_KNOBS):
        others = [name for name in names if name in (*BATCH_KNOBS, *MESH) and name != derived]
        if derived in names:
            decided = {tuple(_key(candidate[name]) for name in (*others, derived)) for candidate in candidates}
            if len(decided) == len({key[:-1] for key in decided}):
                names.remove(derived)
    return names


def _correlations(name: str, values: Sequence[object], weight: float) -> list[list[float]]:
    """The correlation of the effects of each two values, times the knob's weight: smooth in log2 for numbers, none for
    different names."""
    if name not in SMOOTH or not all(isinstance(value, int | float) for value in values):
        return [[weight if one == other else 0.0 for other in range(len(values))] for one in range(len(values))]
    # Zero, as of loader processes, is as far from one as one is from two.
    logs = [math.log2(max(float(str(value)), 0.5)) for value in values]
    return [[weight * math.exp(-0.5 * ((one - other) / LENGTH) ** 2) for other in logs] for one in logs]


def _key(value: object) -> tuple[str, object]:
    """A value that is equal only to one of the same type: 1 is not 1.0, nor True."""
    return type(value).__name__, value

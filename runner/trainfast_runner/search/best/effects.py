"""The effects model: ln of the rate as a sum of knob effects, shrunk pairwise terms, a visit's effect and noise.

A Gaussian process whose covariance is that sum (Duvenaud, Nickisch and Rasmussen, "Additive Gaussian Processes", 2011).
The posterior over all candidates is exact: for each candidate x the vector L^-1 k(x) is kept, where L is the Cholesky
factor of the covariance of the observations (Rasmussen and Williams, "Gaussian Processes for Machine Learning",
algorithm 2.1), and each observation extends it by one component.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul

from trainfast_runner.search.best.candidates import BATCH, MESH
from trainfast_runner.search.best.journal import KnobValues

Setting = tuple[int, ...]
"""A setting as the level of each modelled knob."""
SMOOTH = frozenset((*BATCH, "seq_len", "workers", "prefetch", "micro_batches", "tp_degree", "pp_degree"))
"""Numeric knobs whose near values have near effects."""
LENGTH = 2.0
"""Two values of a smooth knob a factor of 2**LENGTH apart share exp(-1/2) of their effect."""
MEAN_VARIANCE = 4.0
"""The mean of ln rate is as good as unknown."""
RESIDUAL_SHARE = 0.5
"""The standard deviation of what is left beside the pairwise terms, as a share of theirs."""


@dataclass(frozen=True)
class Scales:
    """Prior standard deviations, in ln rate: of a knob's effect, of a pairwise term, between visits."""

    main: float = 0.3
    pair: float = 0.05
    visit: float = 0.01


@dataclass(frozen=True)
class Observation:
    """A measured ln rate (or a difference of two): `terms` are settings with their weights.

    `variance` is that of its noise. Observations of one `visit` share its effect; None is outside every visit.
    """

    terms: tuple[tuple[float, Setting], ...]
    value: float
    variance: float
    visit: str | None = None


class Levels:
    """The candidates as settings: the modelled knobs, their levels, and the correlation of each two levels."""

    def __init__(self, candidates: Sequence[KnobValues]) -> None:
        self.names = _modelled(candidates)
        self.values = {name: list(dict.fromkeys(one[name] for one in candidates)) for name in self.names}
        places = [{_key(value): place for place, value in enumerate(self.values[name])} for name in self.names]
        self._places = dict(zip(self.names, places, strict=True))
        self.settings: list[Setting] = [self.setting(one) for one in candidates]
        self.correlations = [_correlations(name, self.values[name]) for name in self.names]
        self.columns = [[setting[knob] for setting in self.settings] for knob in range(len(self.names))]
        self.numbers = {setting: number for number, setting in enumerate(self.settings)}

    def setting(self, knobs: KnobValues) -> Setting:
        """The levels of these knobs. Raises KeyError for a value that no candidate has."""
        return tuple(self._places[name][_key(knobs[name])] for name in self.names)

    def turned(self, number: int, name: str, level: int) -> int | None:
        """The candidate that differs from one only by a knob's level (and what that decides); None without one."""
        setting = list(self.settings[number])
        setting[self.names.index(name)] = level
        return self.numbers.get(tuple(setting))


class Kernel:
    """Prior covariance of ln rate between settings."""

    def __init__(self, levels: Levels, scales: Scales) -> None:
        self._levels = levels
        self._main, self._pair = scales.main**2, scales.pair**2 / 2
        self._residual = (RESIDUAL_SHARE * scales.pair) ** 2

    def between(self, one: Setting, other: Setting) -> float:
        """The covariance of two settings."""
        same = [table[left][right] for table, left, right in zip(self._levels.correlations, one, other, strict=True)]
        total: float = sum(same)
        # The sum over pairs of products is half the square of the sum without the squares.
        pairs: float = total * total - sum(map(mul, same, same))
        return MEAN_VARIANCE + self._main * total + self._pair * pairs + (self._residual if one == other else 0.0)

    def column(self, setting: Setting) -> list[float]:
        """The covariance of a setting with every candidate."""
        levels, main, pair = self._levels, self._main, self._pair
        rows = [
            [row[level] for level in column]
            for row, column in zip(
                (table[level] for table, level in zip(levels.correlations, setting, strict=True)),
                levels.columns,
                strict=True,
            )
        ]
        if not rows:
            return [MEAN_VARIANCE + self._residual] * len(levels.settings)
        found = []
        for same in zip(*rows, strict=True):
            total = sum(same)
            found.append(MEAN_VARIANCE + main * total + pair * (total * total - sum(map(mul, same, same))))
        if (number := levels.numbers.get(setting)) is not None:
            found[number] += self._residual
        return found


class Factor:
    """The Cholesky factor of the observations' covariance, and the whitened observations."""

    def __init__(self, kernel: Kernel, visit_variance: float, center: float) -> None:
        self.kernel, self.center = kernel, center
        self._visit_variance = visit_variance
        self.observations: list[Observation] = []
        self.rows: list[list[float]] = []
        self.diagonal: list[float] = []
        self.whitened: list[float] = []

    def add(self, observation: Observation) -> tuple[list[float], float, float]:
        """Add an observation; return its row without the diagonal, the diagonal and its whitened value."""
        row: list[float] = []
        for number, other in enumerate(self.observations):
            known = self.rows[number]
            row.append((self._covariance(observation, other) - sum(map(mul, known, row))) / self.diagonal[number])
        own = self._covariance(observation, observation) + observation.variance
        diagonal = math.sqrt(max(own - sum(map(mul, row, row)), 1e-12))
        weight = sum(weight for weight, _ in observation.terms)
        whitened = (observation.value - weight * self.center - sum(map(mul, row, self.whitened))) / diagonal
        self.observations.append(observation)
        self.rows.append(row)
        self.diagonal.append(diagonal)
        self.whitened.append(whitened)
        return row, diagonal, whitened

    @property
    def log_likelihood(self) -> float:
        """The log of the marginal likelihood of the observations, up to a constant."""
        squares: float = sum(map(mul, self.whitened, self.whitened))
        return -sum(map(math.log, self.diagonal)) - 0.5 * squares

    def _covariance(self, one: Observation, other: Observation) -> float:
        found = sum(
            left * right * self.kernel.between(mine, theirs)
            for left, mine in one.terms
            for right, theirs in other.terms
        )
        if one.visit is not None and one.visit == other.visit:
            found += self._visit_variance
        return found


class Posterior:
    """Mean and covariance of every candidate's ln rate after the observations."""

    def __init__(self, levels: Levels, scales: Scales, center: float) -> None:
        self.levels, self.scales, self.center = levels, scales, center
        kernel = Kernel(levels, scales)
        self._factor = Factor(kernel, scales.visit**2, center)
        self.mean = [center] * len(levels.settings)
        self.variance = [kernel.between(setting, setting) for setting in levels.settings]
        self._vectors: list[list[float]] = [[] for _ in levels.settings]

    @property
    def observations(self) -> Sequence[Observation]:
        """The observations so far."""
        return self._factor.observations

    def add(self, observation: Observation) -> None:
        """Take one more observation into account."""
        columns = [(weight, self._factor.kernel.column(setting)) for weight, setting in observation.terms]
        row, diagonal, whitened = self._factor.add(observation)
        weight, column = columns[0]
        covariances = column if weight == 1.0 else [weight * one for one in column]
        for weight, column in columns[1:]:
            covariances = [one + weight * other for one, other in zip(covariances, column, strict=True)]
        mean, variance = self.mean, self.variance
        for number, vector in enumerate(self._vectors):
            component = (covariances[number] - sum(map(mul, row, vector))) / diagonal
            vector.append(component)
            mean[number] += component * whitened
            variance[number] -= component * component

    def covariances(self, one: int) -> list[float]:
        """The posterior covariance of a candidate with every candidate."""
        vector = self._vectors[one]
        prior = self._factor.kernel.column(self.levels.settings[one])
        return [
            covariance - sum(map(mul, vector, other)) for covariance, other in zip(prior, self._vectors, strict=True)
        ]

    def difference(self, one: int, other: int) -> tuple[float, float]:
        """The mean and variance of the ln rate of `one` less that of `other`."""
        between = self._factor.kernel.between(self.levels.settings[one], self.levels.settings[other])
        covariance = between - sum(map(mul, self._vectors[one], self._vectors[other]))
        variance = self.variance[one] + self.variance[other] - 2 * covariance
        return self.mean[one] - self.mean[other], max(variance, 0.0)


def log_likelihood(levels: Levels, scales: Scales, center: float, observations: Sequence[Observation]) -> float:
    """The log of the marginal likelihood of observations under these scales, up to a constant."""
    factor = Factor(Kernel(levels, scales), scales.visit**2, center)
    for observation in observations:
        factor.add(observation)
    return factor.log_likelihood


def _modelled(candidates: Sequence[KnobValues]) -> list[str]:
    """The knobs that have several values, without accumulation where batch and strategy decide it."""
    names = [name for name in candidates[0] if len({_key(one[name]) for one in candidates}) > 1]
    if "grad_accum" in names and "batch_size" in names:
        others = [name for name in names if name == "batch_size" or name in MESH]
        decided = {tuple(_key(one[name]) for name in (*others, "grad_accum")) for one in candidates}
        if len(decided) == len({key[:-1] for key in decided}):
            names.remove("grad_accum")
    return names


def _correlations(name: str, values: Sequence[object]) -> list[list[float]]:
    """The correlation of the effects of each two values: smooth in log2 for numbers, none for different names."""
    if name not in SMOOTH or not all(isinstance(value, int | float) for value in values):
        return [[1.0 if one == other else 0.0 for other in range(len(values))] for one in range(len(values))]
    # Zero, as of loader processes, is as far from one as one is from two.
    places = [math.log2(max(float(str(value)), 0.5)) for value in values]
    return [[math.exp(-0.5 * ((one - other) / LENGTH) ** 2) for other in places] for one in places]


def _key(value: object) -> tuple[str, object]:
    """A value that is equal only to one of the same type: 1 is not 1.0, nor True."""
    return type(value).__name__, value

"""The candidates as points: the level of each modelled knob, and the correlation of the effects of two levels."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from operator import mul

from trainfast_runner.search.candidate_spec import BATCH_KNOBS, MESH_KNOBS
from trainfast_runner.settings.knob_type import KnobValues

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

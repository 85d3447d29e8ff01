"""Medians, spreads and percentiles of samples, and quantiles of the normal and of Student's distribution."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence

from trainfast_runner.records.result import Spread

NORMAL_90, NORMAL_95 = 1.645, 1.960
"""The two-sided 90 % and 95 % quantiles of the normal distribution."""
MAD_TO_SIGMA = 1.4826
"""The standard deviation of normal values by their median absolute deviation (Rousseeuw & Croux, Alternatives to the
Median Absolute Deviation, JASA 88, 1993)."""
MEDIAN_VARIANCE = math.pi / 2
"""The variance of the median of many normal values, over the variance of their mean."""
_STUDENT_95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131),
    *(2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


def student_95(freedom: int) -> float:
    """Return the two-sided 95 % quantile of Student's distribution; from 31 degrees of freedom on the normal one."""
    return _STUDENT_95[freedom - 1] if freedom <= len(_STUDENT_95) else NORMAL_95


def median_rate(rates: Sequence[float]) -> float:
    """Return the rate at the median time; of an even number, of both middle rates together (their harmonic mean).

    Their arithmetic mean belongs to no step time: steps of 1 s and 3 s have rates of 1 and 1/3, and a median of 2 s.
    Raises statistics.StatisticsError without rates.
    """
    low, high = statistics.median_low(rates), statistics.median_high(rates)
    return low if low == high else 2 * low * high / (low + high)


def spread(values: Iterable[float], median: Callable[[Sequence[float]], float] = statistics.median) -> Spread:
    """Median and median absolute deviation; None without values."""
    value_list = list(values)
    if not value_list:
        return Spread()
    middle = median(value_list)
    return Spread(median=middle, mad=statistics.median(abs(value - middle) for value in value_list))


def percentile(values: list[float], share: float) -> float | None:
    """The value below which `share` (0 to 1) of the values lie, between two neighbours on a straight line."""
    if not values:
        return None
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Return the indexes of the points, bytes and rate, that none beats in both, the fastest first; of equals one."""
    front: list[int] = []
    least_bytes = math.inf
    for index in sorted(range(len(points)), key=lambda index: (-points[index][1], points[index][0])):
        if points[index][0] < least_bytes:
            front.append(index)
            least_bytes = points[index][0]
    return front

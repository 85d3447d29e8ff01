"""Confidence interval of a difference measured in several pairs of consecutive runs.

Each pair gives one ratio of throughputs; effects of the machine on both runs of a pair cancel. The interval is
Student's (Biometrika 6, 1908) for the mean of the ratios' logarithms, at 95 %: it needs no guess of what varies from
process to process, because the pairs show it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

LEAST_PAIRS = 3
"""Two pairs would give an interval eight times as wide as their difference."""
NORMAL = 1.960
STUDENT = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131),
    *(2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
"""The two-sided 95 % quantiles of Student's distribution for 1 to 30 degrees of freedom; beyond, the normal one."""


def paired_interval(pairs: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    """95 % confidence interval of the difference in percent of the baseline, from each pair's (baseline, other) rates.
    None with fewer than `LEAST_PAIRS` pairs of positive rates."""
    logs = [math.log(other / base) for base, other in pairs if base > 0 and other > 0]
    if len(logs) < LEAST_PAIRS:
        return None
    middle, freedom = statistics.fmean(logs), len(logs) - 1
    quantile = STUDENT[freedom - 1] if freedom <= len(STUDENT) else NORMAL
    half = quantile * statistics.stdev(logs) / math.sqrt(len(logs))
    return 100 * math.expm1(middle - half), 100 * math.expm1(middle + half)

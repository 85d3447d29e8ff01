"""Confidence interval of a difference measured in several pairs of consecutive runs.

Each pair gives one ratio of throughputs; effects of the machine on both runs of a pair cancel. The interval is
Student's (Biometrika 6, 1908) for the mean of the ratios' logarithms, at 95 %: it needs no guess of what varies from
process to process, because the pairs show it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from trainfast_runner.results.distributions import student_95

MIN_PAIRS = 3
"""Fewest pairs with an interval: two would give one eight times as wide as their difference."""


def paired_interval(pairs: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    """95 % confidence interval of the difference in percent of the baseline.

    Each pair holds the rates of (baseline, variant). None with fewer than `MIN_PAIRS` pairs of positive rates.
    """
    logs = [math.log(variant / base) for base, variant in pairs if base > 0 and variant > 0]
    if len(logs) < MIN_PAIRS:
        return None
    mean_log, freedom = statistics.fmean(logs), len(logs) - 1
    half_width = student_95(freedom) * statistics.stdev(logs) / math.sqrt(len(logs))
    return 100 * math.expm1(mean_log - half_width), 100 * math.expm1(mean_log + half_width)

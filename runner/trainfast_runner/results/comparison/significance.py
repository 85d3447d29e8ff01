"""The rule by which a difference of two medians counts.

The rule of significance, per figure: a median of n values has the variance 1 / (4 n f(m)^2), f the density at the
median m, which for normal values makes its standard error sqrt(pi / 2) sigma / sqrt(n); sigma is estimated as
1.4826 MAD (Rousseeuw & Croux, Alternatives to the Median Absolute Deviation, JASA 88, 1993). A difference counts when
it is over three times the standard error of the difference of the two medians, taken between logarithms so that a
rate and its time per step get the same answer, and over 2 %: a floor for what varies from process to process, which
the steps of one run cannot show. With fewer than five measured steps on a side nothing is significant.
"""

from __future__ import annotations

import math

from trainfast_runner.records.result import MIN_STEPS_TO_COMPARE, Result
from trainfast_runner.results.distributions import MAD_TO_SIGMA, MEDIAN_VARIANCE

ERRORS_APART = 3.0
"""Chosen, not measured: standard errors by which two figures must differ."""
RUN_TO_RUN = 0.02
"""Chosen, not measured: share by which two runs of the same settings differ."""
MEDIAN_ERROR = math.sqrt(MEDIAN_VARIANCE)


def is_significant(a: float | None, b: float | None, noise: float | None) -> bool:
    """True if the ratio of two figures is over `noise` (a share) and the floor; never if `noise` is None.

    If a figure is zero or negative, any difference counts.
    """
    if a is None or b is None or noise is None:
        return False
    if a <= 0 or b <= 0:
        return a != b
    return abs(math.log(b / a)) > max(noise, math.log1p(RUN_TO_RUN))


def ratio_interval(a: float | None, b: float | None, noise: float | None) -> tuple[float, float] | None:
    """The ratio's interval as percentages of `a`; None without a ratio or a noise to build it from."""
    if a is None or b is None or noise is None or a <= 0 or b <= 0:
        return None
    half_width = max(noise, math.log1p(RUN_TO_RUN))
    return 100 * (b / a * math.exp(-half_width) - 1), 100 * (b / a * math.exp(half_width) - 1)


def median_error(mad: float, count: int) -> float:
    """The standard error of the median of `count` values whose median absolute deviation is `mad`."""
    return MEDIAN_ERROR * MAD_TO_SIGMA * mad / math.sqrt(count)


def relative_noise(a: Result, b: Result) -> float | None:
    """The smallest significant difference of step times and rates as a share of the figure; None: too few steps."""
    errors = []
    for result in (a, b):
        throughput, steps = result.throughput, result.steps.measured
        # Steps that differ in size have no median rate: the spread of their times, which is larger, stands for it.
        spread = throughput.steps_per_s if throughput.samples_per_s.median is None else throughput.samples_per_s
        if steps < MIN_STEPS_TO_COMPARE or not spread.median or spread.mad is None:
            return None
        errors.append(median_error(spread.mad / spread.median, steps))
    return ERRORS_APART * math.hypot(*errors)

"""Medians, spreads and percentiles of samples, quantiles of the normal and of Student's distribution, and drifts."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from trainfast_runner.errors import highest
from trainfast_runner.records.result import Spread, SteadyState
from trainfast_runner.records.run_lines import Step

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
    """The value below which `share` (0.01 to 0.99) of the values lie, between two neighbours on a straight line."""
    if len(values) < 2:
        return values[0] if values else None
    return statistics.quantiles(values, n=100, method="inclusive")[round(100 * share) - 1]


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Return the indexes of the points, bytes and rate, that none beats in both, the fastest first; of equals one."""
    front: list[int] = []
    least_bytes = math.inf
    for index in sorted(range(len(points)), key=lambda index: (-points[index][1], points[index][0])):
        if points[index][0] < least_bytes:
            front.append(index)
            least_bytes = points[index][0]
    return front


MAX_BLOCKS = 12
"""Chosen, not measured: most blocks of a run."""
MIN_BLOCKS = 4
"""Chosen, not measured: a shorter run shows no difference between warm-up and steady steps."""
STEPS_IN_A_BLOCK = 2
DRIFT_OF_STEP = 0.02
"""Chosen, not measured: largest change of step time, as a share, that is no drift: two equal runs differ by it."""
DRIFT_C = 2.0
"""Chosen, not measured: degrees C within which a temperature is steady: NVML gives whole degrees."""
COOLING_C_PER_MIN = 1.0
"""Chosen, not measured: least fall that counts as cooling: a slower one is the rounding of NVML's whole degrees."""


class _Block(NamedTuple):
    at_s: float
    step_ms: float
    temperature_c: float | None


def steady_state(steps: Sequence[Step], temperatures: Sequence[Sequence[tuple[int, float]]]) -> SteadyState:
    """The warm-up from measured steps and from each device's temperatures (CLOCK_MONOTONIC ns, degrees).

    The measured steps are cut into blocks of equal count. A run is steady if neither figure drifts over all of them, or
    over their second half. A drift is a Theil-Sen slope (Sen, Estimates of the Regression Coefficient Based on
    Kendall's Tau, JASA 63, 1968) times the length of the window: it survives the odd slow step. For step time it must
    also be a trend by the Mann-Kendall test, since medians of blocks scatter without one.
    """
    blocks = _blocks(steps, temperatures)
    if len(blocks) < MIN_BLOCKS:
        return SteadyState()
    for window in (blocks, blocks[len(blocks) // 2 :]):
        span_s = window[-1].at_s - window[0].at_s
        slope = _slope([(block.at_s, block.temperature_c) for block in window])
        step_slope = _slope([(block.at_s, block.step_ms) for block in window])
        middle_ms = statistics.median(block.step_ms for block in window)
        drift = None if step_slope is None or not middle_ms else step_slope * span_s / middle_ms
        is_large = drift is not None and abs(drift) > DRIFT_OF_STEP
        warms = slope is not None and abs(slope) * span_s > DRIFT_C
        still_warming = warms or (is_large and _trend([block.step_ms for block in window]) > NORMAL_95)
        if not still_warming:
            # A larger drift without a trend is scatter of the blocks.
            drift = None if is_large else drift
            break
    return SteadyState(
        still_warming=still_warming,
        temperature_slope_c_per_min=None if slope is None else 60 * slope,
        step_drift_percent=None if drift is None else 100 * drift,
    )


def drift_text(temperature_slope_c_per_min: float | None) -> str:
    """Words for a drifting run: cooling down after harder work of the GPU, else warming up."""
    return "still cooling down" if is_cooling_down(temperature_slope_c_per_min) else "still warming up"


def is_cooling_down(temperature_slope_c_per_min: float | None) -> bool:
    """True if a drifting run cools down after harder work of the GPU."""
    slope = temperature_slope_c_per_min
    return slope is not None and slope <= -COOLING_C_PER_MIN


def _blocks(steps: Sequence[Step], temperatures: Sequence[Sequence[tuple[int, float]]]) -> list[_Block]:
    count = min(MAX_BLOCKS, len(steps) // STEPS_IN_A_BLOCK)
    blocks = []
    for index in range(count):
        block_steps = steps[len(steps) * index // count : len(steps) * (index + 1) // count]
        begin_ns, end_ns = block_steps[0].begin_ns, block_steps[-1].t_ns
        of_devices = (
            [degrees_c for t_ns, degrees_c in device if begin_ns <= t_ns <= end_ns] for device in temperatures
        )
        temperature_c = highest(map(statistics.fmean, filter(None, of_devices)))
        step_ms = statistics.median(step.step_ms for step in block_steps)
        blocks.append(_Block((begin_ns + end_ns) / 2e9, step_ms, temperature_c))
    return blocks


def _slope(points: Sequence[tuple[float, float | None]]) -> float | None:
    """Theil-Sen: the median of the slopes between every two points."""
    measured_points = [(x, y) for x, y in points if y is not None]
    slopes = [(y1 - y0) / (x1 - x0) for (x0, y0), (x1, y1) in itertools.combinations(measured_points, 2) if x1 > x0]
    # One block may be without a reading.
    return statistics.median(slopes) if len(measured_points) >= MIN_BLOCKS - 1 and slopes else None


def _trend(values: Sequence[float]) -> float:
    """The absolute value of Mann-Kendall's score, a normal quantile: the evidence that the values rise or fall."""
    n = len(values)
    s = sum((b > a) - (b < a) for a, b in itertools.combinations(values, 2))
    variance = n * (n - 1) * (2 * n + 5) / 18
    return max(0, abs(s) - 1) / math.sqrt(variance) if variance else 0.0

"""The range of a y axis: round ends, kept while values move."""

from __future__ import annotations

import math

from trainfast_tui.charts.chart_data import ChartData

LIMIT_HEADROOM = 1.06
"""End of an axis over the limit, so that a point above the limit shows."""
SHRINK_AFTER_NS = 20_000_000_000
"""Chosen, not measured: time of the data after which a range that is too large shrinks."""
_DECIMAL_STEPS = (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0)
_BINARY_STEPS = (1.0, 1.25, 1.5, 1.75, 2.0)
_MAX_VALUE = 1e300
"""Values are clamped to this, so that no length of a range is infinite."""


def nice_ceiling(value: float, *, binary: bool = False) -> float:
    """Return the least round number of at least `value` (> 0): a short decimal, or a short multiple of 2**n."""
    base = 2.0 if binary else 10.0
    unit = base ** math.floor(math.log(value, base))
    for step in _BINARY_STEPS if binary else _DECIMAL_STEPS:
        # Rounding may put a round value a hair above its own step.
        if step * unit >= value * (1 - 1e-12):
            return step * unit
    return base * unit


class YRange:
    """The range of a chart's y axis, in the data's unit; it grows at once and shrinks late.

    The range shrinks only after the data used less than half of it for `SHRINK_AFTER_NS` of the data's own time: the
    picture keeps its scale while values move.
    """

    def __init__(self) -> None:
        self._range: tuple[float, float] | None = None
        self._roomy_since_ns: int | None = None

    def reset(self) -> None:
        """Forget the range; the next fit starts over."""
        self._range = self._roomy_since_ns = None

    def fit(
        self,
        low: float,
        high: float,
        now_ns: int,
        *,
        y_min: float | None = 0.0,
        y_max: float | None = None,
        binary: bool = False,
    ) -> tuple[float, float]:
        """Return the range to draw data from `low` to `high` with, at the data's time `now_ns`.

        `y_min` and `y_max` are the ends of the range while the data stays inside; None follows the data.
        """
        low, high = max(-_MAX_VALUE, min(low, _MAX_VALUE)), max(-_MAX_VALUE, min(high, _MAX_VALUE))
        fitting, current = _round_range(low, high, y_min, y_max, binary), self._range
        if current is None or low < current[0] or high > current[1]:
            if current is not None:
                fitting = (min(fitting[0], current[0]), max(fitting[1], current[1]))
            self._roomy_since_ns, self._range = None, fitting
            return fitting
        length = current[1] - current[0]
        used_length = high - (low if y_min is None else min(low, y_min))
        if fitting[1] - fitting[0] >= length or used_length >= 0.5 * length:
            self._roomy_since_ns = None
        elif self._roomy_since_ns is None or now_ns < self._roomy_since_ns:
            self._roomy_since_ns = now_ns
        elif now_ns - self._roomy_since_ns >= SHRINK_AFTER_NS:
            self._roomy_since_ns, self._range = None, fitting
            return fitting
        return current


def update_y_range(y_range: YRange, data: ChartData, ends: list[tuple[float, float]]) -> tuple[float, float]:
    """Fit `y_range` around the limit and the series, which reach to these `ends`; return its ends."""
    values = [value for bounds in ends for value in bounds]
    if data.limit is not None:
        values.append(data.limit.value)
    return y_range.fit(
        min(values),
        max(values),
        data.axis.end_ns,
        y_min=data.y_min,
        y_max=data.y_max,
        binary=data.binary,
    )


def _round_range(
    low: float, high: float, y_min: float | None, y_max: float | None, binary: bool
) -> tuple[float, float]:
    """Return a range with round ends that holds the data and both fixed ends."""
    bottom = low if y_min is None else min(low, y_min)
    top = high if y_max is None else max(high, y_max)
    is_top_fixed = top == y_max and top > bottom
    if bottom == y_min and is_top_fixed:
        return bottom, top
    # A flat line needs a span, and one below the resolution of a float would divide by zero.
    span = top - bottom
    if span <= max(abs(top), abs(bottom)) * 1e-9 or span < 1e-250:
        span = abs(top) * 0.1 if abs(top) > 1e-200 else 1.0
    step = nice_ceiling(span, binary=binary)
    if bottom == y_min:
        return bottom, bottom + step
    grid = step / 8 if binary else step / 10
    bottom = math.floor(bottom / grid) * grid
    if is_top_fixed:
        return bottom, top
    top = math.ceil(top / grid) * grid
    return bottom, top if top > bottom else bottom + step

"""Bisection over whole numbers."""

from __future__ import annotations

from collections.abc import Callable


def largest_fitting(fits: Callable[[int], bool], largest: int, step: int = 1) -> int:
    """The largest multiple of `step` up to `largest` that fits; 0 if there is none.

    `fits` holds up to some size and for none above it.
    """
    low, high = 0, 1
    while high * step <= largest and fits(high * step):
        low, high = high, 2 * high
    high = min(high, largest // step + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * step) else (low, middle)
    return low * step

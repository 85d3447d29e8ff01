"""Extremes, means and last values of readings that may be missing."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import TypeVar

N = TypeVar("N", int, float)
T = TypeVar("T")


def highest(values: Iterable[N | None]) -> N | None:
    """The highest known value; None without any."""
    return max((value for value in values if value is not None), default=None)


def lowest(values: Iterable[N | None]) -> N | None:
    """The lowest known value; None without any."""
    return min((value for value in values if value is not None), default=None)


def mean_of_known(values: Iterable[float | None]) -> float | None:
    """The mean of the known values; None without any."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def last_known(values: Iterable[T | None]) -> T | None:
    """The last known value; None without any."""
    known = [value for value in values if value is not None]
    return known[-1] if known else None

"""The `type` functions of options that take numbers; each raises ArgumentTypeError."""

from __future__ import annotations

import math
from argparse import ArgumentTypeError

LARGEST = 10**9
"""The largest whole number that an option takes; records hold 64 bits."""


def whole(text: str, least: int = 0) -> int:
    """Return a whole number from `least` on."""
    try:
        value = int(text)
    except ValueError:
        raise ArgumentTypeError(f"must be a whole number, not {text!r}") from None
    if value < least:
        raise ArgumentTypeError(f"must be a whole number from {least} on, not {text!r}")
    if value > LARGEST:
        raise ArgumentTypeError(f"must be at most {LARGEST}, not {text!r}")
    return value


def positive(text: str) -> int:
    """Return a whole number from 1 on."""
    return whole(text, least=1)


def finite(text: str) -> float:
    """Return a number that is neither infinite nor NaN."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ArgumentTypeError(f"must be a number, not {text!r}")
    return value

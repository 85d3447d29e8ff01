"""Bytes, counts and chances in the runner's sentences; extremes of readings that may be missing.

Bytes are in binary units, thousands separated.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

N = TypeVar("N", int, float)


def mebibytes(size_bytes: float) -> str:
    """Whole MiB, for sizes close to each other: `1,234 MiB`."""
    return f"{size_bytes / 2**20:,.0f} MiB"


def gibibytes(size_bytes: float) -> str:
    """Tenths of a GiB, for a whole device or host: `39.5 GiB`."""
    return f"{size_bytes / 2**30:,.1f} GiB"


def process_memory(size_bytes: float) -> str:
    """Memory of a process on a device, as in a table of processes: `300 MiB`, `8.0 GiB`."""
    return gibibytes(size_bytes) if size_bytes >= 2**30 else mebibytes(size_bytes)


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """A count with its noun: `1 step`, `12,345 steps`."""
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"


def chance_text(chance: float, decimals: int = 0) -> str:
    """An estimated chance in percent, never 0 or 100: `31 %`, `over 99 %`, `under 1 %`."""
    least_percent = 10.0**-decimals
    percent = 100 * chance
    if percent < least_percent:
        return f"under {least_percent:g} %"
    if percent > 100 - least_percent:
        return f"over {100 - least_percent:g} %"
    return f"{percent:.{decimals}f} %"


def highest(values: Iterable[N | None]) -> N | None:
    """The highest known value; None without any."""
    return max((value for value in values if value is not None), default=None)


def lowest(values: Iterable[N | None]) -> N | None:
    """The lowest known value; None without any."""
    return min((value for value in values if value is not None), default=None)

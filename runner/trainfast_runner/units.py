"""Bytes, counts, GPUs, durations and chances in the runner's sentences.

Bytes are in binary units, thousands separated.
"""

from __future__ import annotations

from collections.abc import Sequence


def mebibytes(size_bytes: float) -> str:
    """Whole MiB, for sizes close to each other: `1,234 MiB`."""
    return f"{size_bytes / 2**20:,.0f} MiB"


def gibibytes(size_bytes: float) -> str:
    """Tenths of a GiB, for a whole device or host: `39.5 GiB`."""
    return f"{size_bytes / 2**30:,.1f} GiB"


def process_memory(size_bytes: float) -> str:
    """Memory of a process on a device, as in a table of processes: `300 MiB`, `8.0 GiB`."""
    return gibibytes(size_bytes) if size_bytes >= 2**30 else mebibytes(size_bytes)


def compared_size(size_bytes: float) -> str:
    """A size beside another that it may nearly equal, as a peak and its limit: `2,048 MiB`, `39.5 GiB`.

    Below 10 GiB a tenth of a GiB is over 1 % of it, too coarse for the difference.
    """
    return gibibytes(size_bytes) if size_bytes >= 10 * 2**30 else mebibytes(size_bytes)


def short_gibibytes(size_bytes: float) -> str:
    """Three digits of a GiB, for an estimate of a layer or a model: `0.0123 GiB`, `39.5 GiB`; tenths from 1,000 on."""
    return gibibytes(size_bytes) if size_bytes >= 1000 * 2**30 else f"{size_bytes / 2**30:.3g} GiB"


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """A count with its noun: `1 step`, `12,345 steps`."""
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"


def gpus_text(indexes: Sequence[int]) -> str:
    """GPUs by their NVML indexes: `GPU 0`, `GPUs 0 and 1`, `GPUs 0, 1 and 2`; needs at least one."""
    *others, last = map(str, indexes)
    return f"GPUs {', '.join(others)} and {last}" if others else f"GPU {last}"


def duration(seconds: float) -> str:
    """Return a length of time in its two largest units: `4.2 s`, `45 s`, `2 min 05 s`, `1 h 02 min`, `3 d 04 h`.

    A second unit of zero is left out (`2 min`).
    """
    sign, value = ("-", -seconds) if seconds < 0 else ("", seconds)
    if value < 9.95:
        text = f"{value:.1f}"
        return f"{sign if float(text) else ''}{text.removesuffix('.0')} s"
    whole = round(value)
    if whole < 60:
        return f"{sign}{whole} s"
    for large, large_name, small, small_name in (
        (86400, "d", 3600, "h"),
        (3600, "h", 60, "min"),
        (60, "min", 1, "s"),
    ):
        if whole >= large:
            rest = whole % large // small
            return f"{sign}{whole // large} {large_name}" + (f" {rest:02d} {small_name}" if rest else "")
    raise AssertionError("every whole number of seconds from 60 on has a unit")


def chance_text(chance: float, decimals: int = 0) -> str:
    """An estimated chance in percent, never 0 or 100: `31 %`, `over 99 %`, `under 1 %`."""
    least_percent = 10.0**-decimals
    percent = 100 * chance
    if percent < least_percent:
        return f"under {least_percent:g} %"
    if percent > 100 - least_percent:
        return f"over {100 - least_percent:g} %"
    return f"{percent:.{decimals}f} %"

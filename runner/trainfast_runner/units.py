"""Bytes as sentences of the runner say them: binary units, thousands separated."""

from __future__ import annotations


def mebibytes(size_bytes: float) -> str:
    """As whole MiB, in which two sizes close to each other can be told apart: `1,234 MiB`."""
    return f"{size_bytes / 2**20:,.0f} MiB"


def gibibytes(size_bytes: float) -> str:
    """To a tenth of a GiB, for what a whole device or host has: `39.5 GiB`."""
    return f"{size_bytes / 2**30:,.1f} GiB"


def held(size_bytes: float) -> str:
    """What a process holds on a device, in the unit a table of processes shows it in: `300 MiB`, `8.0 GiB`."""
    return gibibytes(size_bytes) if size_bytes >= 2**30 else mebibytes(size_bytes)

"""The memory limit of each rank."""

from __future__ import annotations

from collections.abc import Sequence


def limit_of_rank(limits: Sequence[int] | None, rank: int) -> int | None:
    """Return the rank's own figure, or the last one if there are fewer than ranks; None without limits."""
    return limits[min(rank, len(limits) - 1)] if limits else None

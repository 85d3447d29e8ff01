"""The settings that no other one beats in both memory and throughput."""

from __future__ import annotations

import math
from collections.abc import Sequence


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Return the indexes of the points, bytes and rate, that none beats in both, the fastest first; of equals one."""
    front: list[int] = []
    least_bytes = math.inf
    for index in sorted(range(len(points)), key=lambda index: (-points[index][1], points[index][0])):
        if points[index][0] < least_bytes:
            front.append(index)
            least_bytes = points[index][0]
    return front

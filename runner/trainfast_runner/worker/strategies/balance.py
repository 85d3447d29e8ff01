"""Division of a model's layers into stages of about equal cost."""

from __future__ import annotations


def balance(costs: list[float], head: float, stages: int, entry: float = 0.0) -> tuple[int, ...]:
    """Return the bounds of `stages` non-empty runs of layers that make the most expensive stage as cheap as possible.

    `entry` adds to the first stage, `head` to the last. Among equal divisions the smallest sum of squares wins.
    """
    cost_before = [0.0]
    for cost in costs:
        cost_before.append(cost_before[-1] + cost)
    count = len(costs)
    # best[end] for the first s stages covering `end` layers: (highest, squares, bounds).
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, (0,))}
    for stage in range(1, stages + 1):
        extra = (entry if stage == 1 else 0.0) + (head if stage == stages else 0.0)
        next_best: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for end in range(stage, count - (stages - stage) + 1):
            options = []
            for begin, (highest, squares, bounds) in best.items():
                if begin < end:
                    cost = cost_before[end] - cost_before[begin] + extra
                    options.append((max(highest, cost), squares + cost * cost, (*bounds, end)))
            next_best[end] = min(options)
        best = next_best
    return best[count][2]

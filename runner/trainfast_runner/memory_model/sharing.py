"""What a strategy makes of one process's live bytes: which of them each rank keeps, and what it exchanges."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainfast_runner.memory_model.course import GRADS, Moment, Stack, Vector


class Sharing:
    """One process that shares nothing."""

    def __init__(self, ranks: int, stacks: list[Stack], parameters: int, standing: list[float]) -> None:
        self.ranks = ranks
        self.stacks = stacks
        self.parameters = parameters
        self.standing = standing

    def at(self, moment: Moment) -> Vector:
        """Live bytes by CATEGORIES at a moment of forward or backward."""
        return (*moment.live, 0.0)

    def in_optimizer(self, live: Vector) -> Vector:
        """Live bytes by CATEGORIES at the optimizer's peak."""
        return (*live, 0.0)


class Replicated(Sharing):
    """DDP: the buckets in which gradients are averaged are a second copy of them, kept from the first step on."""

    def at(self, moment: Moment) -> Vector:
        """The buckets are there throughout."""
        return (*moment.live, self.standing[GRADS])

    def in_optimizer(self, live: Vector) -> Vector:
        """The buckets are there throughout."""
        return (*live, self.standing[GRADS])


STRATEGIES: dict[str, type[Sharing]] = {"ddp": Replicated}


def sharing_of(
    knobs: Mapping[str, Any], ranks: int, stacks: list[Stack], parameters: int, standing: list[float]
) -> Sharing:
    """The sharing of the knobs' strategy. `standing` is what is alive before the optimizer's step, by category."""
    return STRATEGIES.get(str(knobs["strategy"]), Sharing)(ranks, stacks, parameters, standing)

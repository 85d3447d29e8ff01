"""The options that a person gives to a search of either kind."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SearchOptions:
    """Options of a search.

    `fresh` ignores an unfinished search and the effects of earlier ones, `wait` queues after a run on the same device,
    `cool_to_c` is the temperature below which each process starts.
    """

    fresh: bool = False
    wait: bool = False
    cool_to_c: float | None = None


@dataclass(frozen=True)
class BatchSearchOptions(SearchOptions):
    """Options of a batch search.

    `no_oom` never runs out of memory on purpose, `confirmation_steps` is the length of the confirmation run.
    """

    no_oom: bool = False
    confirmation_steps: int = 10

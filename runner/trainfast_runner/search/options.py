"""The options that a person gives to a search."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SearchOptions:
    """Options of a search of either kind."""

    fresh: bool = False
    """True to ignore an unfinished search and the effects of earlier ones."""
    wait: bool = False
    """True to queue after a run on the same device."""


@dataclass(frozen=True)
class BatchSearchOptions(SearchOptions):
    """Options of a batch search."""

    no_oom: bool = False
    """True to never run out of memory on purpose."""
    confirmation_steps: int = 10
    """Steps of the confirmation run."""

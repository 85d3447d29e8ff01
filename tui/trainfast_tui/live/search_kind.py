"""The two kinds of search, as the screens tell them apart."""

from __future__ import annotations

from enum import StrEnum


class SearchKind(StrEnum):
    """A kind of search; its value is the scope of its screen's actions in `text.keys`."""

    BATCH = "batch"
    BEST = "best"

    @property
    def label(self) -> str:
        """The name in front of "search"."""
        return "batch" if self is SearchKind.BATCH else "best-fit"

    @property
    def key(self) -> str:
        """The key of the main screen that opens the search."""
        return "b" if self is SearchKind.BATCH else "B"

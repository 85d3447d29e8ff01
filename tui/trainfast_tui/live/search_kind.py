"""The two kinds of search, as the screens tell them apart."""

from __future__ import annotations

from enum import StrEnum

from trainfast_tui.text.keys import key_of


class SearchKind(StrEnum):
    """A kind of search; in `text.keys` its value is the action that opens its screen, and the scope of that screen."""

    BATCH = "batch"
    BEST = "best"

    @property
    def label(self) -> str:
        """The name in front of "search"."""
        return "batch" if self is SearchKind.BATCH else "best-fit"

    @property
    def key(self) -> str:
        """The key of the main screen that opens the search."""
        return key_of("main", self.value)

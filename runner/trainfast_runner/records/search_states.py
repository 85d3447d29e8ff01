"""The states of a search, in groups: of its conductor, and those in which it ended."""

from __future__ import annotations

LIVE_STATES = ("starting", "running", "pausing", "paused")
"""States in which a conductor works on the search; `pausing` finishes its step first."""
PAUSE_STATES = ("pausing", "paused")
UNFINISHED_STATES = ("interrupted", "cancelled")
"""States from which a search can be resumed; `interrupted` has neither a conductor nor an end."""
ANSWERED_STATES = ("answered", "nothing_fits")
"""States of a search with an answer about its knobs; one that `failed` has none."""

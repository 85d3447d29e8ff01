"""The signs of the states of runs and searches, the same on every screen.

The words of a run's state are `state_words` of the runner, which messages of the runner use too.
"""

from __future__ import annotations

from trainfast_tui.text.lines import Piece

_RUN_SIGNS: dict[str, Piece] = {
    "starting": ("○", "secondary"),
    "running": ("●", "success"),
    "stopping": ("●", "warning"),
    "finished": ("✓", "success"),
    "oom": ("✗", "error"),
    "failed": ("✗", "error"),
    "failed_to_start": ("✗", "error"),
    "stopped": ("■", "warning"),
    "killed": ("✗", "warning"),
    "lost": ("✗", "warning"),
}
_SEARCH_SIGNS: dict[str, Piece] = {
    "starting": ("○", "secondary"),
    "running": ("●", "success"),
    "pausing": ("●", "warning"),
    "paused": ("■", "warning"),
    "interrupted": ("✗", "warning"),
    "answered": ("✓", "success"),
    "nothing_fits": ("✗", "error"),
    "failed": ("✗", "error"),
    "cancelled": ("■", "warning"),
}
_UNKNOWN: Piece = ("○", "text")
"""A state of a newer version."""


def run_sign(state: str) -> Piece:
    """Return the sign of a run's state with its tone."""
    return _RUN_SIGNS.get(state, _UNKNOWN)


def search_sign(state: str) -> Piece:
    """Return the sign of a search's state with its tone."""
    return _SEARCH_SIGNS.get(state, _UNKNOWN)

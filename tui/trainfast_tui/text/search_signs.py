"""The sign of a search's state, the same on every screen."""

from __future__ import annotations

from trainfast_tui.text.lines import Piece

_SIGNS: dict[str, Piece] = {
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


def search_sign(state: str) -> Piece:
    """Return the sign of a state with its tone; a hollow one for a state of a newer version."""
    return _SIGNS.get(state, ("○", "text"))

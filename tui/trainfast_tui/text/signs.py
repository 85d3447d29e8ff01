"""The signs and tones of states, of synthetic data and of the phases of a step, the same wherever they are shown.

The words of a run's state are `state_text` of the runner, which messages of the runner use too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from trainfast_tui.text.lines import Line, Piece, Tone

if TYPE_CHECKING:
    from trainfast_runner.records.result import Doubt
    from trainfast_runner.running.follower import RunSnapshot

SYNTHETIC_MARK = "synthetic data"
"""The mark of a run on data drawn at random, whose loss means nothing."""
SYNTHETIC_BADGE: Line = [("  ", "text"), (f" {SYNTHETIC_MARK} ", "badge")]
DOUBT_SIGN = "?"
"""The sign of a figure in doubt, in the tone `warning`."""
STRICT_MALLOC_NOTE = f"{DOUBT_SIGN} strict malloc: its speed is not comparable"
"""Explains the sign at the speeds of a search on a CPU."""
PHASE_TONES: dict[str, Tone] = {
    "data": "warning",
    "forward": "primary",
    "backward": "secondary",
    "optimizer": "accent",
    "other": "muted",
}
"""The tone of each phase of a step."""
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
    "unreadable": ("○", "warning"),
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


def run_sign(state: str, doubts: Sequence[Doubt] | None = None) -> Piece:
    """Return the sign of a run's state with its tone; that of doubt for a finished run whose figures are in doubt."""
    if doubts and state == "finished":
        return DOUBT_SIGN, "warning"
    return _RUN_SIGNS.get(state, _UNKNOWN)


def followed_run_sign(run: RunSnapshot) -> Piece:
    """Return the sign of a followed run: a finished one looks live until its result says whether it is in doubt."""
    if run.result is None:
        return run_sign("running" if run.state == "finished" else run.state)
    return run_sign(run.state, run.result.doubts)


def search_sign(state: str) -> Piece:
    """Return the sign of a search's state with its tone."""
    return _SEARCH_SIGNS.get(state, _UNKNOWN)


def doubt_words(doubts: Sequence[Doubt] | None) -> str:
    """Return the kinds of the doubts about a run's figures: `? other processes, few steps`; empty without a doubt."""
    kinds = dict.fromkeys(doubt.kind.replace("_", " ") for doubt in doubts or ())
    return f"{DOUBT_SIGN} {', '.join(kinds)}" if kinds else ""

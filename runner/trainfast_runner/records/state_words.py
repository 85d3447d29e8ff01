"""The states of a run in words, for screens and messages."""

from __future__ import annotations

STATE_WORDS = {"oom": "out of memory", "failed_to_start": "failed to start"}


def state_words(state: str) -> str:
    """A state in words."""
    return STATE_WORDS.get(state, state.replace("_", " "))

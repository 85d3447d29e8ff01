"""The states of a run and their reasons in words, for screens and messages."""

from __future__ import annotations

STATE_WORDS = {"oom": "out of memory", "failed_to_start": "failed to start"}
NO_STEP = "no optimizer step seen"
"""Begins the reason of a script's run that finished without a step."""


def state_words(state: str) -> str:
    """A state in words."""
    return STATE_WORDS.get(state, state.replace("_", " "))


def notable_reason(state: str, reason: str) -> str:
    """The reason to print beside a state; empty for a finished run, unless none of its steps was seen."""
    return reason if state != "finished" or reason.startswith(NO_STEP) else ""

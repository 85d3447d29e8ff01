"""The states of a run: their exit codes, and their reasons in words for screens and messages."""

from __future__ import annotations

EXIT_CODES = {
    "finished": 0,
    "oom": 3,
    "failed": 4,
    "stopped": 130,
    "killed": 4,
    "lost": 5,
    "failed_to_start": 4,
    "unreadable": 2,
}
END_STATES = frozenset(EXIT_CODES)
"""States of a run that is not followed: it has ended, or this user cannot read it."""
STATES = ("starting", "running", "stopping", *EXIT_CODES)
"""Every state, in the order in which they are listed."""
STATE_WORDS = {"oom": "out of memory", "failed_to_start": "failed to start"}
NO_STEP = "no optimizer step seen"
"""Begins the reason of a script's run that finished without a step."""


def exit_code_of(state: str) -> int:
    """Return the exit code of a command whose run ended in this state; that of "failed" for a newer version's state."""
    return EXIT_CODES.get(state, EXIT_CODES["failed"])


def state_text(state: str) -> str:
    """A state in words."""
    return STATE_WORDS.get(state, state.replace("_", " "))


def notable_reason(state: str, reason: str) -> str:
    """The reason to print beside a state; empty for a finished run, unless none of its steps was seen."""
    return reason if state != "finished" or reason.startswith(NO_STEP) else ""

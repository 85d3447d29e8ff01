"""The state of a search of either kind in words: what it is doing, how far it has come, how it ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainfast_runner.units import counted
from trainfast_tui.text.event_words import wait_words
from trainfast_tui.text.format import plain
from trainfast_tui.text.keys import key_of

if TYPE_CHECKING:
    from trainfast_runner.search.batch_journal import BatchSnapshot
    from trainfast_runner.search.best.answer import BestSoFar


CONTINUE_WORDS = f"{key_of('batch', 'again')} continues"
STATES = {
    "starting": "starting: the model is built, and its memory predicted",
    "pausing": "pausing after this step",
    "paused": "paused: no process is running",
    "interrupted": f"interrupted: no process works on it; {CONTINUE_WORDS}",
}
"""The states of a search that has not ended, in words."""


def state_words(search: BatchSnapshot | BestSoFar) -> str:
    """Return the state of a search, what it is doing, or its answer, in one line."""
    from trainfast_runner.search.batch_journal import BatchSnapshot
    from trainfast_runner.search.journal import CANCELLED_REASON
    from trainfast_tui.text import batch_words, best_words

    if search.state in ("starting", "running") and (waiting := wait_words(search.waits_for)):
        return waiting
    if search.state == "running":
        return batch_words.doing_words(search) if isinstance(search, BatchSnapshot) else best_words.doing_words(search)
    ended = search.ended
    if ended is None or search.state in STATES:
        return STATES.get(search.state, search.state)
    if search.state == "failed":
        return f"failed: {plain(ended.reason)}"
    if search.state == "cancelled":
        reason = "" if ended.reason in ("", CANCELLED_REASON) else f": {plain(ended.reason)}"
        return f"stopped{reason}; its journal is kept, {CONTINUE_WORDS}"
    return batch_words.end_words(search) if isinstance(search, BatchSnapshot) else best_words.end_words(search)


def progress_words(search: BatchSnapshot | BestSoFar, now_ns: int) -> str:
    """Return how far a live search has come at `now_ns` (CLOCK_MONOTONIC): `3/6 · 1:12 left`, `4 probes`."""
    from trainfast_runner.search.batch_journal import BatchSnapshot

    if isinstance(search, BatchSnapshot):
        done, left = counted(len(search.probes), "probe"), ""
    else:
        tried = len({attempt.candidate_number for attempt in search.attempts})
        done = f"{tried}/{len(search.candidates)}" if search.candidates else ""
        budget_s = search.question.budget_s if search.question is not None else 0.0
        minutes, seconds = divmod(round(max(0.0, budget_s - search.spent_s(now_ns))), 60)
        left = f"{minutes}:{seconds:02} left"
    return " · ".join(filter(None, (done, left if search.state == "running" else search.state)))

"""The words of the two searches, shared by screens, commands and reports: the question, the state, the answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from trainfast_runner.records.worker_lines import COLD
from trainfast_runner.units import counted
from trainfast_runner.worker.shared.words import CONFIRMATION, PROBE, TRIAL
from trainfast_tui.text.event_words import wait_words
from trainfast_tui.text.format import Tone, plain
from trainfast_tui.text.keys import key_of

if TYPE_CHECKING:
    from trainfast_runner.search.batch_journal import BatchSnapshot
    from trainfast_runner.search.best.answer import BestSoFar


class Outcome(msgspec.Struct, frozen=True):
    """An outcome of a probe, a trial or a run."""

    sign: str
    tone: Tone
    noun: str
    """For a table."""
    verb: str
    """For a sentence about the size or setting."""


REFUTED = "refuted"
"""The outcome of a size that fitted in the warm process and ran out of memory in a fresh one.

No record has it, nor `confirmed` and `refuting`, the outcomes of a confirmation run.
"""
OUTCOMES = {
    "fits": Outcome("●", "success", "fits", "fits"),
    "measured": Outcome("●", "success", "measured", "is measured"),
    "slow": Outcome("•", "secondary", "slow", "is too slow"),
    "oom": Outcome("✗", "error", "out of memory", "ran out of memory"),
    "failed": Outcome("✗", "error", "failed", "failed"),
    "void": Outcome("~", "warning", "void", "is void"),
    "confirmed": Outcome("✓", "success", "confirmed", "is confirmed"),
    "refuting": Outcome("✗", "error", "out of memory in the confirmation run", "ran out of memory"),
    REFUTED: Outcome("✗", "warning", "fitted, refuted by the confirmation run", "fitted and was refuted"),
}


def outcome_of(outcome: str) -> Outcome:
    """Return the row of an outcome; one of a newer version is named by itself."""
    words = outcome.replace("_", " ")
    return OUTCOMES.get(outcome) or Outcome("○", "text", words, words)


ROLE_WORDS = {
    PROBE: "a search's probe",
    TRIAL: "a search's trials",
    CONFIRMATION: "a search's confirmation run",
    COLD: "a search's run",
}
"""The names of a search's runs by their roles."""


def warm_words(role: str | None, tried: Sequence[int]) -> str:
    """Name a warm process by the sizes or settings it tried: `a search's probe at batch_size 62, after 7`."""
    if not tried:
        return ROLE_WORDS[TRIAL if role == TRIAL else PROBE]
    if role == TRIAL:
        return "a search's trial of a setting" if len(tried) == 1 else f"a search's trials of {len(tried)} settings"
    *before, last = (f"{batch:,}" for batch in tried)
    after = f", after {' and '.join(filter(None, (', '.join(before[:-1]), before[-1])))}" if before else ""
    return f"a search's probe at batch_size {last}{after}"


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

"""A batch search in one line of words: its step under way, or its end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainfast_runner.search.journal.batch import CONFIRM_STEP
from trainfast_tui.text import format as fmt
from trainfast_tui.text.keys import key_of
from trainfast_tui.text.wait_words import wait_words

if TYPE_CHECKING:
    from trainfast_runner.search.batch.batch_follower import BatchSnapshot

CONTINUE_WORDS = f"{key_of('batch', 'again')} continues"


def batch_search_words(search: BatchSnapshot) -> str:
    """Describe the search, or its end, in one line."""
    words = {
        "starting": "starting: the model is built, and its memory predicted",
        "running": "working",
        "pausing": f"pausing after {_under_way(search)}",
        "paused": "paused: no process is running",
        "interrupted": f"interrupted: no process works on it; {CONTINUE_WORDS}",
        "cancelled": f"cancelled; its journal is kept, {CONTINUE_WORDS}",
    }
    return _doing_words(search) or _end_words(search) or words.get(search.state, search.state)


def _doing_words(search: BatchSnapshot) -> str:
    """Return the wait or the step under way; empty without either."""
    if search.state not in ("running", "starting"):
        return ""
    if waiting := wait_words(search.waits_for):
        return waiting
    step = search.newest_step
    if search.state == "starting" or step is None:
        return ""
    if step.action in ("probe", CONFIRM_STEP):
        verb = "probing" if step.action == "probe" else "confirming in a fresh process"
        return f"{verb}: batch_size {step.batch_size:,}"
    if not any(probe.outcome == "fits" for probe in search.probes):
        return "batch_size 1 does not fit: tracing which knobs would make it fit"
    return ""


def _end_words(search: BatchSnapshot) -> str:
    """Return the answer, or the reason there is none; empty for a search that goes on or was cancelled."""
    from trainfast_runner.search.journal.lines import CANCELLED_REASON

    ended = search.ended
    if ended is None:
        return ""
    if (answer := search.answer) is not None:
        max_batch, too_large = answer.max_batch, answer.too_large
        seen = answer.widths
        widths = f" with batches up to {seen.widest:,} wide" if seen is not None and not seen.has_widest else ""
        if too_large is not None and too_large > max_batch + 1:
            return f"batch_size {max_batch:,} fits, confirmed in a fresh process{widths}; {too_large:,} does not"
        return f"batch_size {max_batch:,} is the largest that fits, confirmed in a fresh process{widths}"
    if search.state == "nothing_fits":
        missing = f": {fmt.size(ended.missing_bytes)} too much" if ended.missing_bytes else ""
        return f"batch_size 1 does not fit{missing}"
    if search.state == "failed":
        return f"failed: {fmt.plain(ended.reason)}"
    if search.state == "cancelled" and ended.reason not in ("", CANCELLED_REASON):
        return f"stopped early: {fmt.plain(ended.reason)}; its journal is kept, {CONTINUE_WORDS}"
    return ""


def _under_way(search: BatchSnapshot) -> str:
    """Name the process that a pause waits for."""
    if search.newest_step is None:
        return "the model is built and its memory predicted"
    return "this confirmation run" if search.newest_step.action == CONFIRM_STEP else "this probe"

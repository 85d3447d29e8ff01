"""A search for the largest batch in words: what it does, how it ended, and what of its answer can be applied."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainfast_tui import format as fmt

if TYPE_CHECKING:
    from trainfast_runner.search.follow import SearchSnapshot
    from trainfast_runner.search.journal import Answer


@dataclass(frozen=True, slots=True)
class Choice:
    """What Enter can apply at the end: knobs as they are typed, and in words why one would."""

    label: str
    settings: tuple[tuple[str, str], ...]
    why: str


def choices(search: SearchSnapshot | None) -> tuple[Choice, ...]:
    """The batch sizes found, the recommended one first; where nothing fits, the changes that would help."""
    ended = search.ended if search is not None else None
    if ended is None:
        return ()
    if ended.answer is None:
        return tuple(
            Choice(f"change {place}", tuple(change.settings.items()), _change_words(change.words, change.costs))
            for place, change in enumerate(ended.changes, 1)
        )
    answer = ended.answer
    found = [
        ("recommended", answer.recommended_batch, answer.recommended_why),
        ("aligned", answer.aligned_batch, "the largest multiple of 64" if _by_64(answer) else "a multiple of 8"),
        ("largest", answer.max_batch, _largest_words(answer)),
        ("fastest", answer.fastest_batch, f"{fmt.per_second(answer.fastest_samples_per_s, 'samples')}, of those tried"),
    ]
    return tuple(Choice(label, (("batch_size", str(batch)),), why) for label, batch, why in found if batch is not None)


def state_words(search: SearchSnapshot) -> str:
    """What the search is doing, or how it ended, in one line."""
    step = search.next
    if search.cooling and search.state in ("running", "starting"):
        first, now = search.cooling[0], search.cooling[-1]
        return (
            f"cooling GPU {now.device}: {fmt.celsius(first.temperature_c)}, now {fmt.celsius(now.temperature_c)},"
            f" until below {fmt.celsius(now.below_c)}"
        )
    if search.state == "running" and step is not None and step.action in ("probe", "prove"):
        verb = "probing" if step.action == "probe" else "proving in a fresh process"
        return f"{verb}: batch_size {step.batch_size:,}"
    words = {
        "starting": "starting: the model is built, and its memory predicted",
        "running": "working",
        "pausing": "pauses after the probe it is at",
        "paused": "paused: nothing of it runs",
        "interrupted": "interrupted: nobody works on it any more; f5 takes it up again",
        "cancelled": "cancelled; its journal is kept, f5 goes on",
    }
    ended = search.ended
    if ended is not None and ended.answer is not None:
        return f"batch_size {ended.answer.max_batch:,} is the largest that fits, proved in a fresh process"
    if search.state == "nothing_fits" and ended is not None:
        missing = f": {fmt.size(ended.missing_bytes)} too much" if ended.missing_bytes else ""
        return f"batch_size 1 does not fit{missing}"
    if search.state == "failed" and ended is not None:
        return f"failed: {ended.reason}"
    return words.get(search.state, search.state)


def _by_64(answer: Answer) -> bool:
    return answer.aligned_batch is not None and answer.aligned_batch >= 512


def _largest_words(answer: Answer) -> str:
    return f"proved by {answer.proof_run_id}" if answer.proof_run_id else "the largest that fits"


def _change_words(words: str, costs: str) -> str:
    return f"{words}; speed: {costs}" if costs else words

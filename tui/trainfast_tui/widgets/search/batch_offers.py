"""The settings that an ended batch search offers, of which Enter applies one."""

from __future__ import annotations

from dataclasses import dataclass

from trainfast_runner.search.batch.answer import LARGE_ALIGNED_FROM, LARGE_ALIGNED_UNIT
from trainfast_runner.search.batch.batch_follower import BatchSnapshot
from trainfast_runner.search.batch.decide import ALIGNED_UNIT
from trainfast_tui.text.format import per_second
from trainfast_tui.text.oom_words import effect_words


@dataclass(frozen=True, slots=True)
class Offer:
    """An offer at the end of a search."""

    label: str
    knob_texts: tuple[tuple[str, str], ...]
    """Names of knobs, and their values as they are typed."""
    reason: str
    """Why to take these knobs."""


def offers(search: BatchSnapshot | None) -> tuple[Offer, ...]:
    """Return the batch sizes found, the recommended one first; if nothing fits, the changes that would help."""
    ended = search.ended if search is not None else None
    if ended is None:
        return ()
    if ended.answer is None:
        return tuple(
            Offer(f"change {index}", tuple(change.settings.items()), effect_words(change))
            for index, change in enumerate(ended.changes, 1)
        )
    answer = ended.answer
    confirmation = answer.confirmation_run_id
    is_large = (answer.aligned_batch or 0) >= LARGE_ALIGNED_FROM
    multiple = f"the largest multiple of {LARGE_ALIGNED_UNIT}" if is_large else f"a multiple of {ALIGNED_UNIT}"
    batches = [
        ("recommended", answer.recommended_batch, answer.recommended_why),
        ("aligned", answer.aligned_batch, multiple),
        ("largest", answer.max_batch, f"confirmed by {confirmation}" if confirmation else "the largest that fits"),
        ("fastest", answer.fastest_batch, f"{per_second(answer.fastest_samples_per_s, 'samples')}, of those tried"),
    ]
    return tuple(
        Offer(label, (("batch_size", str(batch)),), reason) for label, batch, reason in batches if batch is not None
    )

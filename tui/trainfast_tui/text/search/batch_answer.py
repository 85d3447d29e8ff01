"""The answer of a batch search: its rows for a report, and its lines for the command line."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from trainfast_runner.units import counted
from trainfast_tui.text.format import count, duration, per_second, plain, size
from trainfast_tui.text.memory_words import phase_words
from trainfast_tui.text.oom_words import CLOSEST_TITLE, change_options
from trainfast_tui.text.tables import pair_lines

if TYPE_CHECKING:
    from trainfast_runner.search.batch.batch_follower import BatchSnapshot
    from trainfast_runner.search.journal.batch import BatchAnswer, BatchEnded


def batch_answer_rows(search: BatchSnapshot, answer: BatchAnswer) -> Iterator[tuple[str, str]]:
    """Yield the labels and words of a search's answer."""
    from trainfast_runner.search.batch.report import measured_under
    from trainfast_runner.search.journal.batch import refuted_by

    question = search.question
    assert question is not None
    confirmed = (
        f"confirmed by {answer.confirmation_run_id}" if answer.confirmation_run_id else "no confirmation run on record"
    )
    if answer.samples_per_s is not None:
        condition = measured_under(question)
        condition_words = f" (under {condition})" if condition is not None else ""
        confirmed += f" at {per_second(answer.samples_per_s, 'samples')}{condition_words}"
    yield "largest batch", f"{count(answer.max_batch)}, {confirmed}; {answer.certainty}"
    if answer.widths_note:
        yield "widths", answer.widths_note
    rank_words = f" on rank {answer.tightest_rank}, the tightest" if question.world_size > 1 else ""
    limit = f"{size(answer.limit_bytes)} ({question.limit_words})" if question.limit_words else size(answer.limit_bytes)
    yield "leaves free", f"{size(answer.headroom_bytes)} of {limit}{rank_words}"
    yield "aligned", count(answer.aligned_batch) if answer.aligned_batch else "none below 8"
    recommended = "none" if answer.recommended_batch is None else count(answer.recommended_batch)
    yield "recommended", f"{recommended}: {answer.recommended_why}"
    phase = phase_words(answer.phase) if answer.phase else "a step"
    yield "memory", f"{size(answer.fixed_bytes)} and {size(answer.bytes_per_sample)} a sample in {phase}"
    if answer.fastest_batch is not None:
        rate = per_second(answer.fastest_samples_per_s, "samples")
        yield "fastest tried", f"{count(answer.fastest_batch)}, {rate}"
    refuted = [count(probe.batch_size) for probe in search.probes if refuted_by(probe, search.confirmations)]
    if refuted:
        yield "refuted", f"{' and '.join(refuted)}: fitted in a probe, ran out of memory in a confirmation run"
    yield "took", _took(search)


def _took(search: BatchSnapshot) -> str:
    """Return the time of an ended search, the sizes tried, and how often memory ran out."""
    assert search.ended is not None
    tried_probes = [probe for probe in search.probes if probe.outcome != "void"]
    oom_probes = sum(probe.outcome == "oom" for probe in tried_probes)
    oom_confirmations = sum(confirmation.state == "oom" for confirmation in search.confirmations)
    confirming = f", and {_times(oom_confirmations)} in a confirmation run" if oom_confirmations else ""
    time_taken = duration(search.ended.seconds)
    return f"{time_taken}, {counted(len(tried_probes), 'size')} tried, memory ran out {_times(oom_probes)}{confirming}"


def _times(number: int) -> str:
    return {0: "never", 1: "once"}.get(number, f"{number} times")


def batch_answer_lines(search: BatchSnapshot, ended: BatchEnded) -> list[str]:
    """Return the answer in lines; without one the end of the search, with the changes as they are typed."""
    if ended.answer is not None:
        return pair_lines(batch_answer_rows(search, ended.answer))
    if ended.state == "cancelled":
        return [f"cancelled; the same command continues {search.directory.name}"]
    lines = [ended.reason]
    if ended.missing_bytes is not None:
        lines = [f"{ended.reason}: at least {size(ended.missing_bytes)} are missing"]
    if ended.changes and all(change.missing_bytes for change in ended.changes):
        lines.append(CLOSEST_TITLE)
    for change in ended.changes:
        doubt = ", not known to be enough" if change.predicted_bytes is None else ""
        costs = f"; speed: {change.costs}" if change.costs else ""
        lines.append(f"  {change_options(change)}: {change.saves}{doubt}{costs}")
    return [plain(line) for line in lines]

"""Make a search's answer from its journal: the largest batch, the aligned one, the recommended one, and why."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from trainfast_runner.errors import UserError, highest, lowest
from trainfast_runner.memory.oom import explain_run, models_of, out_of_memory_of, trace_changes
from trainfast_runner.records.home import Home
from trainfast_runner.records.json_lines import newest
from trainfast_runner.records.result import STRICT_SPEED, Doubt, RunError
from trainfast_runner.records.run_directory import read_records, read_result, read_run_file
from trainfast_runner.records.run_file import BatchWidths
from trainfast_runner.results.doubts import doubts
from trainfast_runner.running.planning import RunPlan
from trainfast_runner.search.batch.decide import (
    ALIGNED_UNIT,
    LARGEST_BATCH,
    TOLERANCE_SHARE,
    BatchState,
)
from trainfast_runner.search.batch_journal import (
    BatchAnswer,
    BatchEnded,
    BatchQuestion,
    BatchSnapshot,
    Change,
    ConfirmationRun,
    Margin,
    Probe,
    read_batch_journal,
    refuted_by,
)
from trainfast_runner.search.conductor import run_within
from trainfast_runner.search.fitted_memory import MemoryFit
from trainfast_runner.search.journal import fields_of, first_fields
from trainfast_runner.units import largest_fitting, mebibytes

LARGE_ALIGNED_UNIT, LARGE_ALIGNED_FROM = 64, 512
"""From this size on an aligned batch is a multiple of 64, which is best for large sizes (NVIDIA's matrix multiplication
guide): alignment then costs an eighth of the batch at most."""
SPREAD_SHARE = TOLERANCE_SHARE
"""Share by which a long run's peak may exceed the confirmation run's: other samples, another order of blocks.

A maximum may be off by the same share and still be called exact."""


def answer_of(state: BatchState) -> BatchAnswer:
    """Return the answer of a journal whose last confirmation run finished."""
    confirmation = state.confirmations[-1]
    max_batch = confirmation.batch_size
    tight_fit = state.tightest(max_batch)
    limiting_line = max(tight_fit.lines, key=lambda phase_line: phase_line.at(max_batch))
    margins = _margins(state, tight_fit, max_batch)
    recommended, recommended_why = _recommended(state, max_batch, margins)
    fastest, rate = _fastest(state)
    failed_sizes = [run.batch_size for run in _failed_runs(state) if run.batch_size > max_batch]
    too_large = min(failed_sizes, default=None)
    widths = _widths(state)
    return BatchAnswer(
        max_batch=max_batch,
        samples_per_s=confirmation.samples_per_s,
        aligned_batch=aligned(max_batch),
        recommended_batch=recommended,
        recommended_why=recommended_why,
        margins=margins,
        fastest_batch=fastest,
        fastest_samples_per_s=rate,
        limit_bytes=tight_fit.limit_bytes,
        headroom_bytes=_headroom(state, tight_fit, max_batch),
        fixed_bytes=round(limiting_line.fixed_bytes),
        bytes_per_sample=round(limiting_line.bytes_per_sample),
        phase=limiting_line.phase,
        tightest_rank=tight_fit.rank,
        confirmation_run_id=confirmation.run_id,
        certainty=_certainty(state, max_batch, too_large),
        too_large=too_large,
        widths=widths,
        widths_note=_widths_note(widths),
    )


def _widths(state: BatchState) -> BatchWidths | None:
    """Return the widths of the batches that the confirmation run took, over all ranks; None if none was seen."""
    confirmed_ranks = state.confirmations[-1].ranks
    ranks = [*confirmed_ranks, *(rank for probe in state.probes_that_fit for rank in probe.ranks)]
    confirmed = [rank.widths for rank in confirmed_ranks if rank.widths is not None]
    if not confirmed:
        return None
    return BatchWidths(
        narrowest=lowest(rank.widths.narrowest for rank in ranks if rank.widths is not None),
        widest=highest(widths.widest for widths in confirmed),
        longest_first=all(widths.longest_first for widths in confirmed),
        looked_at=min(widths.looked_at for widths in confirmed),
        samples=max(widths.samples for widths in confirmed),
    )


def _widths_note(widths: BatchWidths | None) -> str:
    if widths is None or not widths.differ:
        return ""
    seen = f"batches of {widths.narrowest:,} to {widths.widest:,} values a sample were seen"
    if widths.has_widest:
        return f"each size was tried with the longest of all {widths.samples:,} samples; {seen}"
    tried = "the data set tells no lengths"
    if widths.longest_first:
        tried = f"each size was tried with the longest of {widths.looked_at:,} of {widths.samples:,} samples"
    return f"{tried}: {seen}, and a wider batch needs more memory"


def _failed_runs(state: BatchState) -> list[Probe | ConfirmationRun]:
    """Return the probes and confirmation runs that ran out of memory."""
    failed_runs: list[Probe | ConfirmationRun] = [probe for probe in state.probes if probe.outcome == "oom"]
    return failed_runs + [confirmation for confirmation in state.confirmations if confirmation.state == "oom"]


def _certainty(state: BatchState, max_batch: int, too_large: int | None) -> str:
    """Return the reason, in words, that no larger batch is the answer, and the sizes that were not tried."""
    if too_large is None:
        return state.no_more_sizes_reason or state.need_words(max_batch + 1)
    fitted = [probe.batch_size for probe in state.probes_that_fit if max_batch < probe.batch_size < too_large]
    untried = [size for size in range(max_batch + 1, too_large) if size not in fitted]
    words = [f"{too_large} ran out of memory"]
    words += [f"{_sizes_text(fitted)} fitted in a probe, and not in a fresh process"] if fitted else []
    words += [f"{_sizes_text(untried)} not tried"] if untried else []
    return "; ".join(words)


def _sizes_text(sizes: list[int]) -> str:
    return " and ".join(map(str, sizes)) if len(sizes) <= 2 else f"{len(sizes)} sizes from {sizes[0]} to {sizes[-1]}"


def aligned(batch_size: int) -> int | None:
    """Return the largest aligned batch within a batch size; None below 8."""
    unit = LARGE_ALIGNED_UNIT if batch_size >= LARGE_ALIGNED_FROM else ALIGNED_UNIT
    return batch_size // unit * unit or None


def _margins(state: BatchState, tight_fit: MemoryFit, max_batch: int) -> list[Margin]:
    """Return the parts of the memory that the recommended batch leaves free; parts of 0 bytes are listed too."""
    spread_bytes = round(SPREAD_SHARE * tight_fit.need_bytes(max_batch))
    spread_why = f"a long run, whose samples and allocations differ ({SPREAD_SHARE:.0%})"
    margins = [Margin(margin_bytes=spread_bytes, why=spread_why)]
    if state.device == "cuda":
        ranks = [rank for probe in state.probes for rank in probe.ranks if rank.rank == tight_fit.rank]
        last_peaks = [rank for rank in state.probes_that_fit[-1].ranks if rank.rank == tight_fit.rank]
        fragment_bytes = [(rank.peak_reserved_bytes or 0) - (rank.peak_allocated_bytes or 0) for rank in last_peaks]
        available_bytes = [rank.available_bytes for rank in ranks if rank.available_bytes is not None] or [0]
        change_bytes = max(available_bytes) - min(available_bytes)
        for margin_bytes, why in (
            (max(fragment_bytes, default=0), "fragmentation (memory reserved beyond the peak)"),
            (change_bytes, "other users of the GPU, whose share changed while searching"),
        ):
            margins.append(Margin(margin_bytes=margin_bytes, why=why))
    return margins


def _recommended(state: BatchState, max_batch: int, margins: list[Margin]) -> tuple[int | None, str]:
    """Return the largest batch that leaves the margins on every rank and made no allocator retry, and why it does.

    None without one. A rank's limit is left as measured at the largest batch, and more below it by the fit.
    """

    def left_bytes(size: int) -> float:
        return min(
            _headroom(state, fit, max_batch) + fit.need_bytes(max_batch) - fit.need_bytes(size)
            for fit in state.memory_fits
        )

    margin_bytes = sum(margin.margin_bytes for margin in margins)
    reasons = ", and for ".join(margin.why for margin in margins if margin.margin_bytes)
    size = largest_fitting(lambda size: left_bytes(size) >= margin_bytes, min(max_batch, LARGEST_BATCH))
    retried = [probe.batch_size for probe in state.probes_that_fit if probe.alloc_retries]
    retries = f"; from {retried[0]} on the allocator had to retry, which is slow" if retried else ""
    size = min([size, *(batch_size - 1 for batch_size in retried)])
    if size == 0:
        return None, f"no size leaves {mebibytes(margin_bytes)} for {reasons}{retries}"
    if state.device == "cuda":
        size = aligned(size) or size
    # The largest batch was run, and its headroom measured.
    source = "" if size == max_batch else " by the fit"
    left = mebibytes(left_bytes(size))
    return size, f"leaves {left}{source}, of which {mebibytes(margin_bytes)} are for {reasons}{retries}"


def _fastest(state: BatchState) -> tuple[int | None, float | None]:
    """Return the size of the highest rate and the rate, over probes and confirmation runs; None for both on a CPU.

    A search measures memory in every step on a CPU, and such speeds do not rank.
    """
    if state.device != "cuda":
        return None, None
    runs: list[Probe | ConfirmationRun] = list(state.confirmations)
    runs += [probe for probe in state.probes_that_fit if refuted_by(probe, state.confirmations) is None]
    fastest = max(runs, key=lambda run: (run.samples_per_s or 0.0, run.batch_size))
    return (None, None) if fastest.samples_per_s is None else (fastest.batch_size, fastest.samples_per_s)


def _headroom(state: BatchState, memory_fit: MemoryFit, max_batch: int) -> int:
    """Return the bytes that a rank's limit had left at this batch: the least that was measured, else by the fit."""
    probed = [rank for probe in state.probes_that_fit if probe.batch_size == max_batch for rank in probe.ranks]
    peaks = [rank.limit_peak_bytes for rank in probed if rank.rank == memory_fit.rank]
    for rank in state.confirmations[-1].ranks:
        if rank.rank == memory_fit.rank and rank.limit_peak_bytes is not None:
            peaks.append(rank.limit_peak_bytes)
        elif rank.rank == memory_fit.rank and rank.peak_allocated_bytes is not None:
            peaks.append(rank.peak_allocated_bytes + state.uncounted_bytes(rank.rank))
    peak_bytes = highest(peaks)
    return round(memory_fit.limit_bytes - (memory_fit.need_bytes(max_batch) if peak_bytes is None else peak_bytes))


TRACE_CHANGES_WITHIN_S = 30.0
"""If nothing fits, changes that would help are traced for at most this long; the others are listed unpredicted."""


def explain_nothing_fits(
    plan: RunPlan, home: Home, state: BatchState, reason: str, raise_if_cancelled: Callable[[], None]
) -> BatchEnded:
    """Return the end of a search without an answer. `raise_if_cancelled` is called throughout the traces."""
    failed_run = min(_failed_runs(state), key=lambda run: run.batch_size, default=None)
    run = read_run_file(home.directory(failed_run.run_id)) if failed_run is not None else None
    if failed_run is None or run is None:
        return BatchEnded(state="nothing_fits", reason=reason)
    # No changes are explained for a probe, so the run has no role here.
    run_of_one = msgspec.structs.replace(run, role=None, knobs={**run.knobs, "batch_size": 1}, predicted=None)
    directory = home.directory(failed_run.run_id)
    result = read_result(directory)
    error = result.error if result is not None else None
    if error is None and isinstance(failed_run, Probe):
        error = RunError(rank=failed_run.rank, phase=failed_run.phase, message=failed_run.reason)
    oom_run = out_of_memory_of(read_records(directory), run_of_one, failed_run.reason, error)
    if isinstance(failed_run, Probe) and failed_run.peak_allocated_bytes is not None:
        oom_run = replace(oom_run, held_bytes=failed_run.peak_allocated_bytes)
    with suppress(UserError, OSError):  # OSError: a full temporary folder
        run_within(
            TRACE_CHANGES_WITHIN_S,
            lambda cancelled: list(trace_changes(oom_run, plan.python, cancelled)),
            raise_if_cancelled,
        )
    explained = explain_run(oom_run, models_of(run_of_one, plan.python))
    changes = [
        Change(**msgspec.structs.asdict(change)) for change in explained.changes if "batch_size" not in change.settings
    ]
    missing_bytes = explained.missing_bytes or explained.asked_bytes
    return BatchEnded(state="nothing_fits", reason=reason, missing_bytes=missing_bytes, changes=changes)


PROBE_FIELDS = (
    *("batch_size", "outcome", "peak_allocated_bytes", "peak_reserved_bytes", "phase_peaks", "samples_per_s"),
    *("step_ms", "seconds", "phase", "rank", "reason", "run_id"),
)
"""Fields of a `Probe` in the report."""
CONFIRMATION_FIELDS = (
    *("batch_size", "state", "peak_allocated_bytes", "samples_per_s", "step_ms", "seconds", "reason", "run_id"),
    "refutes",
)
"""Fields of a `ConfirmationRun` in the report."""
PREDICTED_FIELDS = ("fixed_bytes", "bytes_per_sample", "max_batch", "basis", "reason")
"""Fields of a `Predicted` line in the report."""


def batch_report(directory: Path) -> dict[str, Any]:
    """Return the whole search as one object; absent figures are None."""
    journal = BatchSnapshot(tuple(read_batch_journal(directory)), directory)
    question, prediction, end = journal.question, journal.prediction, newest(journal.lines, BatchEnded)
    assert question is not None, "a journal begins with its question"
    answer = end.answer if end is not None else None
    fastest = widths = None
    if answer is not None and answer.fastest_batch is not None:
        fastest = {"batch_size": answer.fastest_batch, "samples_per_s": answer.fastest_samples_per_s}
    if answer is not None and answer.widths is not None:
        widths = {**msgspec.structs.asdict(answer.widths), "note": answer.widths_note or None}
    return {
        **first_fields(question, end),
        **fields_of(answer, "max_batch", "samples_per_s", "aligned_batch", "recommended_batch"),
        "measured_under": measured_under(question),
        "doubts": _doubts(directory, question, answer),
        "recommended_reason": answer.recommended_why if answer else None,
        "margins": answer.margins if answer else [],
        "fastest": fastest,
        "probes": [_probe(probe, journal) for probe in journal.probes],
        "model": fields_of(answer, "fixed_bytes", "bytes_per_sample", "phase"),
        "predicted": None if prediction is None else fields_of(prediction, *PREDICTED_FIELDS),
        "limit": question.limit_words,
        "limit_bytes": answer.limit_bytes if answer else question.lowest_limit_bytes,
        **fields_of(question, "limits_bytes", "world_size"),
        **fields_of(answer, "tightest_rank"),
        "proof_run_id": answer.confirmation_run_id if answer else None,
        "proofs": [fields_of(confirmation, *CONFIRMATION_FIELDS) for confirmation in journal.confirmations],
        **fields_of(answer, "headroom_bytes", "certainty", "too_large"),
        "widths": widths,
        "changes": end.changes if end is not None else [],
        **fields_of(end, "missing_bytes", "seconds"),
    }


def measured_under(question: BatchQuestion) -> str | None:
    """Return the condition under which the search measures speed; None if the condition does not change speed."""
    return STRICT_SPEED if question.device == "cpu" else None


def _doubts(directory: Path, question: BatchQuestion, answer: BatchAnswer | None) -> list[Doubt]:
    """The doubts about the speeds: the condition of all of them, then those of the confirmation run."""
    run_id = None if answer is None else answer.confirmation_run_id
    result = None if run_id is None else read_result(directory.parent.parent / "runs" / run_id)
    found = {doubt.kind: doubt for doubt in (doubts(result) if result is not None else ())}
    if (condition := measured_under(question)) is not None:
        found["strict_malloc"] = Doubt(kind="strict_malloc", text=f"speeds were measured under {condition}")
    return [*found.values()]


def _probe(probe: Probe, journal: BatchSnapshot) -> dict[str, Any]:
    """One probe; `refuted_by` is the confirmation run that ran out of memory although this size had fitted."""
    refuting_run = refuted_by(probe, journal.confirmations)
    return {**fields_of(probe, *PROBE_FIELDS), "refuted_by": None if refuting_run is None else refuting_run.run_id}

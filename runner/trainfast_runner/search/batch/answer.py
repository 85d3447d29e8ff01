"""Make a search's answer from its journal: the largest batch, the aligned one, the recommended one, and why."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from trainfast_runner.errors import UserError, highest, lowest
from trainfast_runner.memory.oom import OutOfMemory, explain_run, held_bytes_of, models_of, trace_changes
from trainfast_runner.records.home import Home
from trainfast_runner.records.json_lines import newest
from trainfast_runner.records.result import STRICT_SPEED, Doubt, OomExplanation, RunError
from trainfast_runner.records.run_directory import read_result, read_run_file
from trainfast_runner.records.run_file import BatchWidths
from trainfast_runner.records.run_records import read_records
from trainfast_runner.results.doubts import doubts
from trainfast_runner.running.planning import RunPlan
from trainfast_runner.search.batch.decide import (
    ALIGNED_UNIT,
    LARGEST_BATCH,
    MAX_PROBES,
    TOLERANCE_BYTES,
    TOLERANCE_SHARE,
    BatchState,
    deciding_size,
    memory_fits_by_rank,
    no_more_sizes_reason,
    tightest,
    tolerance_bytes,
    uncounted_bytes,
)
from trainfast_runner.search.batch_journal import (
    BatchAnswer,
    BatchEnded,
    BatchJournal,
    BatchLaunched,
    BatchLine,
    BatchQuestion,
    BatchStep,
    Change,
    ConfirmationRun,
    Margin,
    Probe,
    read_batch_journal,
    refuted_by,
)
from trainfast_runner.search.conductor import wait_until
from trainfast_runner.search.fitted_memory import MemoryFit
from trainfast_runner.search.followed_journal import FollowedJournal, SearchSnapshot, state_of_search
from trainfast_runner.search.journal import Conducted, Paused, Resumed, Waiting, fields_of, first_fields
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
    max_batch, memory_fits = confirmation.batch_size, memory_fits_by_rank(state)
    tight_fit = tightest(memory_fits, max_batch)
    limiting_line = max(tight_fit.lines, key=lambda phase_line: phase_line.at(max_batch))
    margins = _margins(state, tight_fit, max_batch)
    margin_bytes = sum(margin.margin_bytes for margin in margins)
    recommended = _recommended(state, memory_fits, max_batch, margin_bytes)
    fastest, rate = _fastest(state)
    too_large = _too_large(state, max_batch)
    widths = _widths(state)
    return BatchAnswer(
        max_batch=max_batch,
        samples_per_s=confirmation.samples_per_s,
        aligned_batch=aligned(max_batch),
        recommended_batch=recommended,
        recommended_why=_recommended_why(state, max_batch, recommended, memory_fits, margins),
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
        certainty=_certainty(state, memory_fits, max_batch, too_large),
        too_large=too_large,
        widths=widths,
        widths_note=_widths_note(widths),
    )


def _widths(state: BatchState) -> BatchWidths | None:
    """Return the widths of the batches that the confirmation run took, over all ranks; None if none was seen."""
    confirmed_ranks = state.confirmations[-1].ranks
    ranks = [*confirmed_ranks, *(rank for probe in state.probes_that_fit for rank in probe.ranks)]
    narrowest = lowest(rank.widths.narrowest for rank in ranks if rank.widths is not None)
    confirmed = [rank.widths for rank in confirmed_ranks if rank.widths is not None]
    if not confirmed or narrowest is None:
        return None
    return BatchWidths(
        narrowest=narrowest,
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
    wider = "a wider batch needs more memory"
    if widths.longest_first:
        looked_at = f"{widths.looked_at:,} looked at, of {widths.samples:,}"
        return f"each size was tried with the longest samples of {looked_at}; {seen}, and {wider}"
    return f"widths vary and the data set tells no lengths: {seen}, and {wider}"


def _too_large(state: BatchState, max_batch: int) -> int | None:
    """Return the smallest size above the answer that ran out of memory, probed or confirmed; None if none did."""
    probed_sizes = [probe.batch_size for probe in state.probes if probe.outcome == "oom"]
    confirmed_sizes = [confirmation.batch_size for confirmation in state.confirmations if confirmation.state == "oom"]
    return min((size for size in (*probed_sizes, *confirmed_sizes) if size > max_batch), default=None)


def _certainty(state: BatchState, memory_fits: tuple[MemoryFit, ...], max_batch: int, too_large: int | None) -> str:
    """Return the reason, in words, that no larger batch is the answer, and the sizes that were not tried."""
    if too_large is None:
        return no_more_sizes_reason(state, max_batch) or _need_by_fit_text(
            tightest(memory_fits, max_batch), max_batch + 1
        )
    text = f"{too_large} ran out of memory"
    probed_sizes = [probe.batch_size for probe in state.probes_that_fit if max_batch < probe.batch_size < too_large]
    if probed_sizes:
        verb = "was" if len(probed_sizes) == 1 else "were"
        text += f"; {_sizes_text(probed_sizes)} fitted in a probe and {verb} not confirmed"
    untried_sizes = [size for size in range(max_batch + 1, too_large) if size not in probed_sizes]
    if untried_sizes:
        reason = _untried_text(state, memory_fits, max_batch, too_large)
        text += f"; {_sizes_text(untried_sizes)}{reason} {'was' if len(untried_sizes) == 1 else 'were'} not tried"
    return text


def _need_by_fit_text(tight_fit: MemoryFit, batch_size: int) -> str:
    """Return the memory that a batch size needs by the fit, and the fit's error, in words."""
    error = mebibytes(tight_fit.error_at(batch_size))
    return f"by the fit {batch_size} needs {tight_fit.need_text(batch_size)}, give or take {error}"


def _untried_text(state: BatchState, memory_fits: tuple[MemoryFit, ...], max_batch: int, too_large: int) -> str:
    """Return why sizes below `too_large` were left out, as an aside; empty if that size ran out in a fresh process."""
    if too_large <= deciding_size(state, memory_fits, max_batch):
        if state.device == "cuda":
            return ", below the next multiple of 8,"
        return f", {_tolerance_text(tightest(memory_fits, max_batch), max_batch)},"
    return f", beyond the {MAX_PROBES} sizes that a search tries," if state.counted_probes >= MAX_PROBES else ""


def _tolerance_text(tight_fit: MemoryFit, max_batch: int) -> str:
    """Name the tolerance in force above the largest batch: a share of its memory, or the least one in bytes."""
    allowed_bytes = tolerance_bytes(tight_fit.need_bytes(max_batch))
    share = f" ({100 * TOLERANCE_SHARE:.0f} % of what {max_batch} needs)" if allowed_bytes > TOLERANCE_BYTES else ""
    return f"within the tolerance of {mebibytes(allowed_bytes)}{share}"


def _sizes_text(sizes: list[int]) -> str:
    if len(sizes) <= 2:
        return " and ".join(map(str, sizes))
    return f"{len(sizes)} sizes from {sizes[0]} to {sizes[-1]}"


def aligned(batch_size: int) -> int | None:
    """Return the largest aligned batch within a batch size; None below 8."""
    unit = LARGE_ALIGNED_UNIT if batch_size >= LARGE_ALIGNED_FROM else ALIGNED_UNIT
    return batch_size // unit * unit or None


def _margins(state: BatchState, tight_fit: MemoryFit, max_batch: int) -> list[Margin]:
    """Return the parts of the memory that the recommended batch leaves free; parts of 0 bytes are listed too."""
    margins = [
        Margin(
            margin_bytes=round(SPREAD_SHARE * tight_fit.need_bytes(max_batch)),
            why=f"a long run, whose samples and allocations differ ({SPREAD_SHARE:.0%})",
        )
    ]
    if state.device == "cuda":
        peaks = [rank for probe in state.probes_that_fit[-1:] for rank in probe.ranks if rank.rank == tight_fit.rank]
        fragment_bytes = max(
            ((peak.peak_reserved_bytes or 0) - (peak.peak_allocated_bytes or 0) for peak in peaks), default=0
        )
        margins.append(Margin(margin_bytes=fragment_bytes, why="fragmentation (memory reserved beyond the peak)"))
        available_bytes = [
            rank.available_bytes for probe in state.probes for rank in probe.ranks if rank.rank == tight_fit.rank
        ]
        known_bytes = [value for value in available_bytes if value is not None]
        change_bytes = max(known_bytes) - min(known_bytes) if known_bytes else 0
        margins.append(
            Margin(margin_bytes=change_bytes, why="other users of the GPU, whose share changed while searching")
        )
    margins.append(Margin(margin_bytes=0, why="evaluation, which needs less: it keeps nothing for a backward"))
    return margins


def _recommended(
    state: BatchState, memory_fits: tuple[MemoryFit, ...], max_batch: int, margin_bytes: int
) -> int | None:
    """Return the largest batch that leaves the margin on every rank and made no allocator retry; None without one."""
    largest_batch = largest_fitting(
        lambda size: all(_left_bytes(state, fit, max_batch, size) >= margin_bytes for fit in memory_fits),
        min(max_batch, LARGEST_BATCH),
    )
    retried_batch = _smallest_retried(state)
    if retried_batch is not None:
        largest_batch = min(largest_batch, retried_batch - 1)
    if state.device == "cuda":
        largest_batch = aligned(largest_batch) or largest_batch
    return largest_batch or None


def _left_bytes(state: BatchState, memory_fit: MemoryFit, max_batch: int, size: int) -> float:
    """Return the bytes of a rank's limit that a size leaves: as measured at the largest batch, less by the fit."""
    less_bytes = memory_fit.need_bytes(max_batch) - memory_fit.need_bytes(size)
    return _headroom(state, memory_fit, max_batch) + less_bytes


def _smallest_retried(state: BatchState) -> int | None:
    return min((probe.batch_size for probe in state.probes_that_fit if probe.alloc_retries), default=None)


def _recommended_why(
    state: BatchState,
    max_batch: int,
    recommended: int | None,
    memory_fits: tuple[MemoryFit, ...],
    margins: list[Margin],
) -> str:
    margin_bytes = sum(margin.margin_bytes for margin in margins)
    reasons = ", and for ".join(margin.why for margin in margins if margin.margin_bytes)
    retried_batch = _smallest_retried(state)
    retries = ""
    if retried_batch is not None and retried_batch <= max_batch:
        retries = f"; from {retried_batch} on the allocator had to free its cache and retry, which is slow"
    if recommended is None:
        return f"no size leaves {mebibytes(margin_bytes)} for {reasons}{retries}"
    left_bytes = min(_left_bytes(state, fit, max_batch, recommended) for fit in memory_fits)
    # The largest batch was run, and its headroom measured.
    source = "" if recommended == max_batch else " by the fit"
    text = f"leaves {mebibytes(left_bytes)}{source}, of which {mebibytes(margin_bytes)} are for {reasons}{retries}"
    if state.device == "cuda" and aligned(recommended) == recommended:
        text += "; aligned for tensor cores"
    return text


def _fastest(state: BatchState) -> tuple[int | None, float | None]:
    """Return the size of the highest rate and the rate, over probes and confirmation runs; None for both on a CPU.

    A search measures memory in every step on a CPU, and such speeds do not rank.
    """
    if state.device != "cuda":
        return None, None
    probed_rates = [
        (probe.samples_per_s, probe.batch_size)
        for probe in state.probes_that_fit
        if refuted_by(probe, state.confirmations) is None
    ]
    confirmed_rates = [(confirmation.samples_per_s, confirmation.batch_size) for confirmation in state.confirmations]
    rates = [(rate, size) for rate, size in (*probed_rates, *confirmed_rates) if rate is not None]
    rate, size = max(rates, default=(None, None))
    return size, rate


def _headroom(state: BatchState, memory_fit: MemoryFit, max_batch: int) -> int:
    """Return the bytes that a rank's limit had left at this batch: the least that was measured, else by the fit."""
    peaks = [
        rank.limit_peak_bytes
        for probe in state.probes_that_fit
        for rank in probe.ranks
        if probe.batch_size == max_batch and rank.rank == memory_fit.rank
    ]
    confirmed_bytes = _peak_in_confirmation(state.confirmations[-1], memory_fit.rank)
    if confirmed_bytes is not None:
        peaks.append(confirmed_bytes + uncounted_bytes(state, memory_fit.rank))
    peak_bytes = highest(peaks)
    return round(memory_fit.limit_bytes - (memory_fit.need_bytes(max_batch) if peak_bytes is None else peak_bytes))


def _peak_in_confirmation(confirmation: ConfirmationRun, rank: int) -> int | None:
    """Return the rank's own peak; in a journal older than peaks by rank that of the fullest rank."""
    if not confirmation.ranks:
        return confirmation.peak_allocated_bytes
    return next((peaks.peak_allocated_bytes for peaks in confirmation.ranks if peaks.rank == rank), None)


TRACE_CHANGES_WITHIN_S = 30.0
"""If nothing fits, changes that would help are traced for at most this long."""


def explain_nothing_fits(
    plan: RunPlan, home: Home, state: BatchState, reason: str, raise_if_cancelled: Callable[[], None]
) -> BatchEnded:
    """Return the end of a search without an answer. `raise_if_cancelled` is called throughout the traces."""
    failed_run = _smallest_failure(state)
    run = read_run_file(home.directory(failed_run.run_id)) if failed_run is not None else None
    if failed_run is None or run is None:
        return BatchEnded(state="nothing_fits", reason=reason)
    phase = failed_run.phase if isinstance(failed_run, Probe) else None
    # No changes are explained for a probe, so the run has no role here.
    run_of_one = msgspec.structs.replace(run, role=None, knobs={**run.knobs, "batch_size": 1}, predicted=None)
    result = read_result(home.directory(failed_run.run_id))
    rank = failed_run.rank if isinstance(failed_run, Probe) else None
    error = (result.error if result is not None else None) or RunError(
        rank=rank, phase=phase, message=failed_run.reason
    )
    held_bytes = failed_run.peak_allocated_bytes if isinstance(failed_run, Probe) else None
    if held_bytes is None and failed_run.batch_size == 1:
        held_bytes = held_bytes_of(read_records(home.directory(failed_run.run_id)), error)
    oom_run = OutOfMemory(run=run_of_one, reason=failed_run.reason, error=error, held_bytes=held_bytes)
    _trace_changes(oom_run, plan.python, raise_if_cancelled)
    explained = explain_run(oom_run, models_of(run_of_one, plan.python))
    least_missing_bytes = missing_bytes(explained, failed_run)
    changes = [
        Change(**msgspec.structs.asdict(change)) for change in explained.changes if "batch_size" not in change.settings
    ]
    return BatchEnded(state="nothing_fits", reason=reason, missing_bytes=least_missing_bytes, changes=changes)


def _trace_changes(oom_run: OutOfMemory, python: str, raise_if_cancelled: Callable[[], None]) -> None:
    """Trace the memory models of changes that may be enough; those not traced in time are listed unpredicted."""
    cancelled = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        traces = pool.submit(lambda: list(trace_changes(oom_run, python, cancelled)))
        try:
            wait_until(traces.done, raise_if_cancelled, time.monotonic() + TRACE_CHANGES_WITHIN_S)
        finally:
            cancelled.set()
    with suppress(UserError):
        traces.result()


def missing_bytes(explained: OomExplanation, failed_run: Probe | ConfirmationRun) -> int | None:
    """Return the missing bytes by the prediction, the peak beyond the limit, or the last request; None if unknown."""
    if explained.missing_bytes is not None:
        return explained.missing_bytes
    excess_bytes = 0
    if explained.limit_bytes is not None and failed_run.peak_allocated_bytes is not None:
        excess_bytes = failed_run.peak_allocated_bytes - explained.limit_bytes
    return excess_bytes if excess_bytes > 0 else explained.asked_bytes


def _smallest_failure(state: BatchState) -> Probe | ConfirmationRun | None:
    """Return the smallest size that ran out of memory; None if none did."""
    failed_runs: list[Probe | ConfirmationRun] = [probe for probe in state.probes if probe.outcome == "oom"]
    failed_runs += [confirmation for confirmation in state.confirmations if confirmation.state == "oom"]
    return min(failed_runs, key=lambda probe: probe.batch_size, default=None)


PROBE_FIELDS = (
    "batch_size",
    "outcome",
    "peak_allocated_bytes",
    "peak_reserved_bytes",
    "phase_peaks",
    "samples_per_s",
    "step_ms",
    "seconds",
    "phase",
    "rank",
    "reason",
    "run_id",
)
"""Fields of a `Probe` in the report."""
CONFIRMATION_FIELDS = (
    "batch_size",
    "state",
    "peak_allocated_bytes",
    "samples_per_s",
    "step_ms",
    "seconds",
    "reason",
    "run_id",
    "refutes",
)
"""Fields of a `ConfirmationRun` in the report."""
PREDICTED_FIELDS = ("fixed_bytes", "bytes_per_sample", "max_batch", "basis", "reason")
"""Fields of a `Predicted` line in the report."""


def batch_report(directory: Path) -> dict[str, Any]:
    """Return the whole search as one object; absent figures are None."""
    journal = BatchJournal(tuple(read_batch_journal(directory)))
    question, prediction, end = journal.question, journal.prediction, newest(journal.lines, BatchEnded)
    assert question is not None, "a journal begins with its question"
    answer = end.answer if end is not None else None
    return {
        **first_fields(question, end),
        **fields_of(answer, "max_batch", "samples_per_s", "aligned_batch", "recommended_batch"),
        "measured_under": measured_under(question),
        "doubts": _doubts(directory, question, answer),
        "recommended_reason": answer.recommended_why if answer else None,
        "margins": answer.margins if answer else [],
        "fastest": _fastest_report(answer),
        "probes": [_probe(probe, journal.confirmations) for probe in journal.probes],
        "model": fields_of(answer, "fixed_bytes", "bytes_per_sample", "phase"),
        "predicted": None if prediction is None else fields_of(prediction, *PREDICTED_FIELDS),
        "limit": question.limit_words,
        "limit_bytes": answer.limit_bytes if answer else question.lowest_limit_bytes,
        "limits_bytes": question.limits_bytes,
        "world_size": question.world_size,
        **fields_of(answer, "tightest_rank"),
        "proof_run_id": answer.confirmation_run_id if answer else None,
        "proofs": [fields_of(confirmation, *CONFIRMATION_FIELDS) for confirmation in journal.confirmations],
        **fields_of(answer, "headroom_bytes", "certainty", "too_large"),
        "widths": _widths_report(answer),
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


def _probe(probe: Probe, confirmations: Sequence[ConfirmationRun]) -> dict[str, Any]:
    """One probe; `refuted_by` is the confirmation run that ran out of memory although this size had fitted."""
    refuting_run = refuted_by(probe, confirmations)
    return {**fields_of(probe, *PROBE_FIELDS), "refuted_by": None if refuting_run is None else refuting_run.run_id}


def _widths_report(answer: BatchAnswer | None) -> dict[str, Any] | None:
    """Return the widths of a script's batches that the answer holds for; None if none was seen."""
    if answer is None or answer.widths is None:
        return None
    return {**msgspec.structs.asdict(answer.widths), "note": answer.widths_note or None}


def _fastest_report(answer: BatchAnswer | None) -> dict[str, Any] | None:
    if answer is None or answer.fastest_batch is None:
        return None
    return {"batch_size": answer.fastest_batch, "samples_per_s": answer.fastest_samples_per_s}


@dataclass(frozen=True)
class BatchSnapshot(BatchJournal, SearchSnapshot):
    """The state of a batch search at one moment, and its journal's lines so far."""

    unreadable_lines: int

    @cached_property
    def is_decided(self) -> bool:
        """False if the newest step is done and the next is not decided yet."""
        steps = (line for line in reversed(self.lines) if isinstance(line, BatchStep | Probe | ConfirmationRun))
        return isinstance(next(steps, None), BatchStep | None)

    @property
    def memory_fits(self) -> tuple[MemoryFit, ...]:
        """The newest fits, one for each rank; empty before the first probe."""
        return () if self._fitted_step is None else tuple(self._fitted_step.memory_fits)

    @cached_property
    def tightest_fit(self) -> MemoryFit | None:
        """The newest fit of the rank with the least memory left; None before the first probe."""
        if self._fitted_step is None:
            return None
        rank = self._fitted_step.tightest_rank if self.answer is None else self.answer.tightest_rank
        return next((fit for fit in self.memory_fits if fit.rank == rank), self.memory_fits[0])

    @cached_property
    def _fitted_step(self) -> BatchStep | None:
        """The newest step that was decided by a fit."""
        return next((line for line in reversed(self.lines) if isinstance(line, BatchStep) and line.memory_fits), None)

    @cached_property
    def run_id(self) -> str | None:
        """The search's current run; None between conductors and after the end."""
        last_line = next(
            (line for line in reversed(self.lines) if isinstance(line, BatchLaunched | Conducted | BatchEnded)), None
        )
        return last_line.run_id if isinstance(last_line, BatchLaunched) else None

    @cached_property
    def since_ns(self) -> int | None:
        """CLOCK_MONOTONIC when the current step or wait began; before the first step, when the conductor began."""
        starts = BatchStep | Conducted | Paused | Waiting | Resumed
        return next((line.t_ns for line in reversed(self.lines) if isinstance(line, starts)), None)

    @cached_property
    def confirmation_steps(self) -> int | None:
        """Optimizer steps of a confirmation run; None before a conductor has begun."""
        conducted = newest(self.lines, Conducted)
        return None if conducted is None else conducted.confirmation_steps

    @property
    def answer(self) -> BatchAnswer | None:
        """The answer; None before the search has one."""
        return None if self.ended is None else self.ended.answer


class BatchFollower:
    """Reads new journal lines at each `poll`. Not safe to share between threads."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._journal: FollowedJournal[BatchLine] = FollowedJournal(directory, BatchLine)
        self._snapshot = BatchSnapshot(directory=directory, state="starting", lines=(), unreadable_lines=0)

    def poll(self) -> BatchSnapshot:
        """Read the new lines and return a snapshot: the last one if neither the lines nor the state changed."""
        has_conductor = self._journal.read()
        lines, unreadable_lines, snapshot = self._journal.lines, self._journal.unreadable_lines, self._snapshot
        if (len(lines), unreadable_lines) != (len(snapshot.lines), snapshot.unreadable_lines):
            snapshot = replace(snapshot, lines=lines, unreadable_lines=unreadable_lines)
        state = state_of_search(self.directory, snapshot, has_conductor=has_conductor)
        self._snapshot = snapshot if state == snapshot.state else replace(snapshot, state=state)
        return self._snapshot

"""Make a search's answer from its journal: the largest batch, the aligned one, the recommended one, and why."""

from __future__ import annotations

from trainfast_runner.bisection import largest_fitting
from trainfast_runner.known_values import highest, lowest
from trainfast_runner.records.script_run import BatchWidths
from trainfast_runner.search.batch.decide import (
    ALIGNED_UNIT,
    MAX_PROBES,
    TOLERANCE_BYTES,
    TOLERANCE_SHARE,
    deciding_size,
    no_more_sizes_reason,
    tolerance_bytes,
)
from trainfast_runner.search.batch.state import (
    LARGEST_BATCH,
    BatchState,
    memory_fits_by_rank,
    tightest,
    uncounted_bytes,
)
from trainfast_runner.search.journal.batch import BatchAnswer, ConfirmationRun, Margin, refuted_by
from trainfast_runner.search.journal.fitted_memory import MemoryFit
from trainfast_runner.units import mebibytes

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

"""Decide the next step of a batch search and its answer from its journal, with reasons in words. Touches nothing.

Two sizes give each phase's line (the secant); after the first size the prediction's slope stands in. The search then
tries the size that should not fit, so memory runs out once, and a fresh process confirms the largest size that fits by
the line. A size near the boundary is tried first only while the error of the line leaves the answer open.
On a GPU the reserved memory runs out, which scatters with fragmentation: there the line alone chooses the size to
confirm, and a confirmation run that runs out of memory says how much was missing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from trainfast_runner.errors import highest, lowest
from trainfast_runner.records.run_file import BatchWidths
from trainfast_runner.search import batch_journal
from trainfast_runner.search.journal import EndState
from trainfast_runner.units import counted, largest_fitting, mebibytes

MAX_PROBES = 16
"""Chosen, not measured: a search that has tried this many sizes confirms the largest that fitted."""
MAX_VOID_PROBES = 4
"""Chosen, not measured: a search ends after this many probes in which other processes took memory."""
LARGEST_BATCH = 1 << 20
"""The largest batch size that is tried."""
TOLERANCE_SHARE, TOLERANCE_BYTES = 0.03, 48 << 20
"""A maximum is exact when the smallest size that needs this much more runs out of memory."""
ALIGNED_UNIT = 8
"""Tensor cores work on multiples of 8 (NVIDIA's matrix multiplication guide)."""
FIRST_SIZE_DIVISOR = 8
"""The first size is this part of the predicted maximum: quick, and large enough for a slope."""
SMALLER_SIZE_DIVISOR = 4
"""Chosen, not measured: a first size that does not fit is divided by this until one fits."""

LARGE_ALIGNED_UNIT, LARGE_ALIGNED_FROM = 64, 512
"""From this size on an aligned batch is a multiple of 64, which is best for large sizes (NVIDIA's matrix multiplication
guide): alignment then costs an eighth of the batch at most."""
SPREAD_SHARE = TOLERANCE_SHARE
"""Share by which a long run's peak may exceed the confirmation run's: other samples, another order of blocks.

A maximum may be off by the same share and still be called exact."""


@dataclass(frozen=True)
class BatchState(batch_journal.BatchSnapshot):
    """A search with the sizes that its fits allow."""

    no_oom: bool = False

    @cached_property
    def largest_fitted(self) -> int:
        """The largest size that fitted; 0 before any did."""
        return max((probe.batch_size for probe in self.probes_that_fit), default=0)

    @property
    def has_line(self) -> bool:
        """True if two sizes fitted: one alone says nothing of the growth."""
        return len(self.probes_that_fit) > 1

    @property
    def counted_probes(self) -> int:
        """Number of probes that count."""
        return sum(probe.outcome != "void" for probe in self.probes)

    def need_words(self, batch_size: int) -> str:
        """Return the need of this batch size on the tightest rank by the fit, with the error of the fit."""
        fit = self.tightest(batch_size)
        need, limit, error = map(mebibytes, (fit.need_bytes(batch_size), fit.limit_bytes, fit.error_at(batch_size)))
        rank = f" on rank {fit.rank}" if self.asked.world_size > 1 else ""
        return f"by the fit {batch_size} needs {need} of {limit}{rank}, give or take {error}"

    def fits_by_line(self, batch_size: int) -> bool:
        """True if the size fits on every rank by its fit."""
        return self.tightest(batch_size).left_bytes(batch_size) >= 0

    @cached_property
    def largest_sure(self) -> int:
        """The largest size that fits on every rank even if the fit is off by its whole error."""
        return largest_fitting(lambda size: all(fit.surely_fits(size) for fit in self.fits), LARGEST_BATCH)

    @cached_property
    def largest_likely(self) -> int:
        """The largest size that fitted, or that fits by a fit of two sizes or more: surely fits, except on a GPU."""
        by_fit = self.largest_sure if self.has_line else 0
        if self.has_line and self.asked.device == "cuda" and not self.no_oom:
            by_fit = min(largest_fitting(self.fits_by_line, LARGEST_BATCH), by_fit + ALIGNED_UNIT)
        return max(self.largest_fitted, by_fit)

    def deciding_size(self, max_batch: int) -> int:
        """Return the smallest size that must run out of memory for `max_batch` to be the maximum.

        On a GPU the next aligned size; on a CPU the size that needs 3 % or 48 MiB more, whichever is more.
        """
        if self.asked.device == "cuda":
            return (max_batch // ALIGNED_UNIT + 1) * ALIGNED_UNIT
        fit = self.tightest(max_batch)
        need_bytes = fit.need_bytes(max_batch)
        needed_bytes = need_bytes + max(TOLERANCE_SHARE * need_bytes, TOLERANCE_BYTES)

        def is_near(size: int) -> bool:
            """True if a size needs less, even with the steepest growth that the error of the fit allows."""
            return fit.need_bytes(size) + fit.error_per_sample * max(0, size - max_batch) < needed_bytes

        return max(max_batch, largest_fitting(is_near, LARGEST_BATCH)) + 1

    @property
    def no_more_sizes_reason(self) -> str | None:
        """The reason that no further size is probed; None while one may be."""
        if self.largest_fitted >= LARGEST_BATCH:
            return f"no size above {LARGEST_BATCH} is tried"
        if any(probe.fills_data and probe.batch_size <= self.largest_fitted for probe in self.probes):
            return f"the script's data fills no batch above {self.largest_fitted}"
        return f"a search tries at most {MAX_PROBES} sizes" if self.counted_probes >= MAX_PROBES else None


def decide(state: BatchState) -> batch_journal.BatchStep:
    """Return the next step."""
    if len(state.probes) - state.counted_probes >= MAX_VOID_PROBES:
        return _end("failed", f"other processes took memory in {MAX_VOID_PROBES} probes: nothing can be measured here")
    if state.confirmations:
        return _after_confirmation(state)
    return _towards_boundary(state) if state.fits else _before_any_fitted(state)


def _probe(batch_size: int, reason: str) -> batch_journal.BatchStep:
    return batch_journal.BatchStep(action="probe", batch_size=batch_size, why=reason)


def _confirm(batch_size: int, reason: str) -> batch_journal.BatchStep:
    words = f"{reason}: confirming {batch_size} in a fresh process"
    return batch_journal.BatchStep(action=batch_journal.CONFIRM_STEP, batch_size=batch_size, why=words)


def _end(end_state: EndState, reason: str, batch_size: int | None = None) -> batch_journal.BatchStep:
    return batch_journal.BatchStep(action="end", batch_size=batch_size, why=reason, end_state=end_state)


def _before_any_fitted(state: BatchState) -> batch_journal.BatchStep:
    """Probe a small size by the prediction, else the start that it names; then much smaller ones, down to 1."""
    prediction, too_large = state.prediction or batch_journal.Predicted(), state.too_large
    if too_large == 1:
        return _end("nothing_fits", "a batch of 1 does not fit")
    if too_large is not None:
        contrary = ", contrary to the prediction" if prediction.max_batch else ""
        smaller_size = max(1, too_large // SMALLER_SIZE_DIVISOR)
        return _probe(smaller_size, f"{too_large} does not fit{contrary}: trying a much smaller size")
    if prediction.max_batch is None:
        start_text = "a batch of 1" if prediction.start == 1 else "the script's own batch size"
        return _probe(prediction.start, f"no prediction: starting at {start_text}")
    small_size = max(1, min(prediction.max_batch, LARGEST_BATCH) // FIRST_SIZE_DIVISOR)
    words = f"predicted: at most {prediction.max_batch} fits"
    return _probe(small_size, f"{words}; trying {small_size} first, to check the prediction")


def _towards_boundary(state: BatchState) -> batch_journal.BatchStep:
    """After a size fitted: probe the next one, or confirm once the sizes on both sides are close enough."""
    fitted, too_large = state.largest_fitted, state.too_large
    below_too_large = (too_large or LARGEST_BATCH + 1) - 1
    likely_size = max(fitted, min(state.largest_likely, below_too_large))
    next_size = state.deciding_size(likely_size)
    likely_words = f"{likely_size} fits" if likely_size == fitted else state.need_words(likely_size)
    # On a GPU the sizes up to the next aligned one can be many times the size that fitted.
    needs_line = state.asked.device == "cuda" and not state.has_line and fitted < below_too_large
    if too_large is not None and too_large <= next_size and not needs_line:
        return _confirm(likely_size, f"{likely_words}, and {too_large} does not fit")
    if (reason := state.no_more_sizes_reason) is not None:
        return _confirm(fitted, f"{reason}, and {fitted} is the largest that fitted")
    target, predicted_max = state.largest_sure, state.prediction.max_batch if state.prediction is not None else None
    if not state.has_line and predicted_max:
        # Half-way to the predicted maximum is enough for a first slope, and quick.
        target = min(target, max(fitted + 1, (fitted + predicted_max) // 2))
    # Running out of memory takes a part of a step. A size near the maximum would make the fit surer, in two steps.
    may_run_out = state.has_line and not state.no_oom and next_size <= LARGEST_BATCH
    runs_out = may_run_out and not state.fits_by_line(next_size)
    if fitted < target <= below_too_large and (too_large or not runs_out):
        return _probe(target, f"{state.need_words(target)}, and fits even then")
    if too_large is not None:
        return _between(state, too_large)
    if state.no_oom and state.has_line:
        return _confirm(likely_size, f"{likely_words}, and {state.need_words(likely_size + 1)}")
    words = f"{likely_size} should fit, and {state.need_words(next_size)}"
    return _probe(next_size, f"{words}: running it shows whether it fits")


def _between(state: BatchState, too_large: int) -> batch_journal.BatchStep:
    """Probe between a size that fitted and a size that was too large, further apart than the tolerance."""
    fitted = state.largest_fitted
    if sum(probe.outcome == "oom" for probe in state.probes) == 1:
        size = largest_fitting(lambda size: state.deciding_size(size) < too_large, too_large - 1) + 1
        size = min(max(size, fitted + 1), too_large - 1)
        return _probe(size, f"{too_large} does not fit: if {size} fits, the maximum is known within the tolerance")
    middle = (fitted + too_large) // 2
    return _probe(middle, f"{too_large} does not fit either; trying half-way to {fitted}, which fits")


def _after_confirmation(state: BatchState) -> batch_journal.BatchStep:
    """End the search if the last confirmation run finished; if memory ran out, confirm or probe a smaller size."""
    last_run = state.confirmations[-1]
    last_size = last_run.batch_size
    if last_run.state == "finished":
        return _end("answered", f"a fresh process finished with {last_size}", last_size)
    if last_run.state != "oom":
        return _end("failed", f"the confirmation run of {last_size} ended {last_run.state}: {last_run.reason}")
    if last_size == 1:
        return _end("nothing_fits", "a batch of 1 does not fit in a fresh process")
    failed_size = min(last_size, state.too_large or last_size)
    missing_bytes = last_run.missing_bytes or 0
    if _is_refuted(state, failed_size, missing_bytes if failed_size == last_size else 0):
        # Without this probe a convex curve took up to 54 failed confirmation runs.
        middle = (state.largest_fitted + failed_size) // 2
        reason = f"{failed_size} ran out of memory, contrary to the fit"
        return _probe(middle, f"{reason}: trying half-way to {state.largest_fitted}, which fits")
    # Sizes that were tried since then may have corrected the fit.
    step_down = _step_down(state, last_size, missing_bytes)
    smaller_size = max(1, min(failed_size - 1, last_size - step_down, state.largest_likely))
    words = f"{last_size} ran out of memory in a fresh process"
    if any(probe.batch_size == last_size for probe in state.probes_that_fit):
        words += ", whose data and allocations differ from those of the probe in which it fitted"
    return _confirm(smaller_size, f"{words}; {smaller_size} should fit")


def _step_down(state: BatchState, size: int, missing_bytes: int) -> int:
    """Return the samples by which to step down: on a GPU those that need what was missing, else half the tolerance."""
    if state.asked.device != "cuda":
        # With small samples, half the tolerance is more samples than the batch has.
        return min(max(1, (state.deciding_size(size) - size) // 2), (size + 1) // 2)
    fit, fitted = state.tightest(size), state.largest_fitted
    missing_samples = missing_bytes / max(1.0, fit.left_bytes(size - 1) - fit.left_bytes(size))
    # More may have been missing than the failed request: every further failed run doubles the least step.
    step_down = max(math.ceil(missing_samples), 1 << (len(state.confirmations) - 1))
    return min(step_down, size - fitted) if fitted < size else step_down


def _is_refuted(state: BatchState, batch_size: int, missing_bytes: int) -> bool:
    """True if the fit is wrong by more than the little that a fresh process needs beyond a warm one.

    The size that ran out needs more than the fit and its error, and by more than the tolerance unless an earlier
    confirmation run ran out too. On a GPU a size that fitted close below says no more: fragmentation scatters.
    """
    close_size = min(
        batch_size - 1, batch_journal.MAX_SIZE_RATIO * batch_size if state.asked.device == "cuda" else batch_size
    )
    if state.largest_fitted >= close_size or state.counted_probes >= MAX_PROBES:
        return False
    fit = state.tightest(batch_size)
    wrong_bytes = fit.left_bytes(batch_size) + missing_bytes
    # A size tried since then may have corrected the fit.
    is_wrong = wrong_bytes >= fit.error_at(batch_size)
    return is_wrong and (wrong_bytes > TOLERANCE_BYTES or len(state.confirmations) > 1)


def answer_of(state: BatchState) -> batch_journal.BatchAnswer:
    """Return the answer of a journal whose last confirmation run finished."""
    confirmation = state.confirmations[-1]
    max_batch = confirmation.batch_size
    tight_fit = state.tightest(max_batch)
    limiting_line = max(tight_fit.lines, key=lambda phase_line: phase_line.at(max_batch))
    recommended, recommended_why = _recommended(state, max_batch, margins_of(state, tight_fit, max_batch))
    fastest = _fastest(state)
    too_large = min((run.batch_size for run in failed_runs(state) if run.batch_size > max_batch), default=None)
    certainty = state.no_more_sizes_reason or state.need_words(max_batch + 1)
    if too_large is not None:
        between = f"{counted(too_large - max_batch - 1, 'size')} between them not confirmed"
        next_words = between if state.fits_by_line(max_batch + 1) else certainty
        certainty = f"{too_large} ran out of memory" + (f"; {next_words}" if too_large > max_batch + 1 else "")
    widths = _widths(state)
    return batch_journal.BatchAnswer(
        max_batch=max_batch,
        samples_per_s=confirmation.samples_per_s,
        aligned_batch=aligned(max_batch),
        recommended_batch=recommended,
        recommended_why=recommended_why,
        fastest_batch=fastest.batch_size if fastest is not None else None,
        fastest_samples_per_s=fastest.samples_per_s if fastest is not None else None,
        limit_bytes=tight_fit.limit_bytes,
        headroom_bytes=_headroom(state, tight_fit, max_batch),
        fixed_bytes=round(limiting_line.fixed_bytes),
        bytes_per_sample=round(limiting_line.bytes_per_sample),
        phase=limiting_line.phase,
        tightest_rank=tight_fit.rank,
        confirmation_run_id=confirmation.run_id,
        certainty=certainty,
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


def failed_runs(state: BatchState) -> list[batch_journal.Probe | batch_journal.ConfirmationRun]:
    """Return the probes and confirmation runs that ran out of memory."""
    failed_probes: list[batch_journal.Probe | batch_journal.ConfirmationRun] = [
        probe for probe in state.probes if probe.outcome == "oom"
    ]
    return failed_probes + [confirmation for confirmation in state.confirmations if confirmation.state == "oom"]


def aligned(batch_size: int) -> int | None:
    """Return the largest aligned batch within a batch size; None below 8."""
    unit = LARGE_ALIGNED_UNIT if batch_size >= LARGE_ALIGNED_FROM else ALIGNED_UNIT
    return batch_size // unit * unit or None


def margins_of(state: BatchState, fit: batch_journal.MemoryFit, max_batch: int) -> dict[str, int]:
    """Return the bytes that the recommended batch leaves free, by the reason."""
    spread_bytes = round(SPREAD_SHARE * fit.need_bytes(max_batch))
    margins = {f"a long run, whose samples and allocations differ ({SPREAD_SHARE:.0%})": spread_bytes}
    if state.asked.device != "cuda":
        return margins
    ranks = [rank for probe in state.probes for rank in probe.ranks if rank.rank == fit.rank]
    available_bytes = [rank.available_bytes for rank in ranks if rank.available_bytes is not None] or [0]
    changed = "other users of the GPU, whose share changed while searching"
    return {**margins, changed: max(available_bytes) - min(available_bytes)}


def _recommended(state: BatchState, max_batch: int, margins: dict[str, int]) -> tuple[int | None, str]:
    """Return the largest batch that leaves the margins on every rank and made no allocator retry, and why it does.

    None without one. A rank's limit is left as measured at the largest batch, and more below it by the fit.
    """
    headrooms = [(fit, _headroom(state, fit, max_batch)) for fit in state.fits]

    def left_bytes(size: int) -> float:
        return min(headroom + fit.need_bytes(max_batch) - fit.need_bytes(size) for fit, headroom in headrooms)

    margin_bytes = sum(margins.values())
    reasons = ", and for ".join(why for why, part_bytes in margins.items() if part_bytes)
    size = largest_fitting(lambda size: left_bytes(size) >= margin_bytes, min(max_batch, LARGEST_BATCH))
    retried = [probe.batch_size for probe in state.probes_that_fit if probe.alloc_retries]
    retries = f"; from {retried[0]} on the allocator had to retry, which is slow" if retried else ""
    size = min([size, *(batch_size - 1 for batch_size in retried)])
    if size == 0:
        return None, f"no size leaves {mebibytes(margin_bytes)} for {reasons}{retries}"
    if state.asked.device == "cuda":
        size = aligned(size) or size
    # The largest batch was run, and its headroom measured.
    left = f"{mebibytes(left_bytes(size))}{'' if size == max_batch else ' by the fit'}"
    return size, f"leaves {left}, of which {mebibytes(margin_bytes)} are for {reasons}{retries}"


def _fastest(state: BatchState) -> batch_journal.Tried | None:
    """Return the probe or confirmation run of the highest rate; None on a CPU.

    A search measures memory in every step on a CPU, and such speeds do not rank.
    """
    if state.asked.device != "cuda":
        return None
    fitted = [probe for probe in state.probes_that_fit if state.refuted_by(probe) is None]
    timed = [run for run in (*state.confirmations, *fitted) if run.samples_per_s is not None]
    return max(timed, key=lambda run: (run.samples_per_s or 0.0, run.batch_size), default=None)


def _headroom(state: BatchState, fit: batch_journal.MemoryFit, max_batch: int) -> int:
    """Return the bytes that a rank's limit had left at this batch: the least that was measured, else by the fit."""
    tried: list[batch_journal.Tried] = [probe for probe in state.probes_that_fit if probe.batch_size == max_batch]
    ranks = [rank for run in (*tried, state.confirmations[-1]) for rank in run.ranks if rank.rank == fit.rank]
    peak_bytes = highest(state.counted_bytes(rank) for rank in ranks)
    return round(fit.limit_bytes - (fit.need_bytes(max_batch) if peak_bytes is None else peak_bytes))

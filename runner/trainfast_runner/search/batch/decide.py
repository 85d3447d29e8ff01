"""Decide the next step of a batch search from its journal, with the reason in words. Touches nothing.

Two sizes give each phase's line (the secant); after the first size the prediction's slope stands in. The search then
tries the size that should not fit, so memory runs out once, and a fresh process confirms the largest size that fits by
the line. A size near the boundary is tried first only while the error of the line leaves the answer open.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import msgspec

from trainfast_runner.errors import UserError, lowest
from trainfast_runner.machine.training_python import ProgramCancelled
from trainfast_runner.memory.model import MemoryModel, Prediction
from trainfast_runner.memory.tracing import TraceProgress, trace_model
from trainfast_runner.running.planning import RunPlan
from trainfast_runner.search.batch_journal import (
    CONFIRM_STEP,
    BatchLine,
    BatchSnapshot,
    BatchStep,
    ConfirmationRun,
    Predicted,
    Probe,
    RankPeaks,
)
from trainfast_runner.search.fitted_memory import MemoryFit, fit_lines
from trainfast_runner.search.journal import EndState
from trainfast_runner.units import largest_fitting, mebibytes
from trainfast_runner.worker.shared.host import print_holder
from trainfast_runner.worker.shared.memory_limit import limit_of_rank

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


@dataclass(frozen=True)
class BatchState:
    """State of a search: the question, and every size tried.

    Limits are bytes by rank, empty on a GPU without memory_limit.
    """

    device: str
    world_size: int
    limits_bytes: tuple[int, ...] = ()
    prediction: Predicted | None = None
    probes: tuple[Probe, ...] = ()
    confirmations: tuple[ConfirmationRun, ...] = ()
    no_oom: bool = False

    @cached_property
    def probes_that_fit(self) -> list[Probe]:
        """Probes that fitted, the smallest first."""
        return sorted((probe for probe in self.probes if probe.outcome == "fits"), key=lambda probe: probe.batch_size)

    @property
    def largest_fitted(self) -> int:
        """The largest size that fitted; 0 before any did."""
        return max((probe.batch_size for probe in self.probes_that_fit), default=0)

    @property
    def largest_allowed(self) -> int:
        """The largest size that may be tried: a script's data fills no larger one."""
        return min((probe.batch_size for probe in self.probes if probe.fills_data), default=LARGEST_BATCH)

    @property
    def too_large(self) -> int | None:
        """The smallest size that ran out of memory in a probe."""
        return min((probe.batch_size for probe in self.probes if probe.outcome == "oom"), default=None)

    @property
    def counted_probes(self) -> int:
        """Number of probes that count."""
        return sum(probe.outcome != "void" for probe in self.probes)

    @cached_property
    def memory_fits(self) -> tuple[MemoryFit, ...]:
        """The fit of each rank; empty before any size fitted."""
        fits = self._fits_with_slope(None if self.prediction is None else self.prediction.bytes_per_sample)
        if self.too_large is None or len(self.probes_that_fit) != 1:
            return fits
        # By a wrong prediction's slope the size that ran out would fit.
        is_refuted = all(fit.surely_fits(self.too_large) for fit in fits)
        return self._fits_with_slope(None) if is_refuted else fits

    def _fits_with_slope(self, slope: float | None) -> tuple[MemoryFit, ...]:
        memory_fits = []
        for rank in range(self.world_size):
            points, uncounted_bytes = {}, 0
            for probe, peaks in self._peaks_of(rank):
                uncounted_bytes = _uncounted(peaks, uncounted_bytes)
                points[probe.batch_size] = {name: peak + uncounted_bytes for name, peak in peaks.phase_peaks.items()}
            limit_bytes = self.limit_bytes(rank)
            if points and limit_bytes is not None:
                fit = fit_lines(points, self.device, slope)
                memory_fits.append(MemoryFit(rank=rank, limit_bytes=limit_bytes, **msgspec.structs.asdict(fit)))
        return tuple(memory_fits)

    def _peaks_of(self, rank: int) -> list[tuple[Probe, RankPeaks]]:
        """A rank's peaks in the probes that fitted, the smallest first."""
        return [
            (probe, peaks)
            for probe in self.probes_that_fit
            for peaks in probe.ranks
            if peaks.rank == rank and peaks.phase_peaks
        ]

    def uncounted_bytes(self, rank: int) -> int:
        """Return the bytes that the rank's limit counts beyond its peak, at the largest size where both are known."""
        uncounted_bytes = 0
        for _, peaks in self._peaks_of(rank):
            uncounted_bytes = _uncounted(peaks, uncounted_bytes)
        return uncounted_bytes

    def limit_bytes(self, rank: int) -> int | None:
        """Return the rank's limit in bytes, or its last reported available memory if that is less; None without."""
        available_bytes = [
            peaks.available_bytes
            for probe in self.probes
            for peaks in probe.ranks
            if peaks.rank == rank and peaks.available_bytes is not None
        ]
        return lowest((limit_of_rank(self.limits_bytes, rank), *available_bytes[-1:]))

    def tightest(self, batch_size: int) -> MemoryFit:
        """Return the fit that leaves the least at this batch size."""
        return min(self.memory_fits, key=lambda fit: fit.limit_bytes - fit.need_bytes(batch_size))

    @cached_property
    def largest_sure(self) -> int:
        """The largest size that fits on every rank even if the fit is off by its whole error."""
        return largest_fitting(lambda size: all(fit.surely_fits(size) for fit in self.memory_fits), LARGEST_BATCH)

    @property
    def largest_likely(self) -> int:
        """The largest size that fitted, or that surely fits by a fit of two sizes or more."""
        # A fit of a single size has no measured slope, so no other size is sure.
        return max(self.largest_fitted, self.largest_sure if len(self.probes_that_fit) > 1 else 0)

    def deciding_size(self, max_batch: int) -> int:
        """Return the smallest size that must run out of memory for `max_batch` to be the maximum.

        On a GPU the next aligned size; on a CPU the size that needs 3 % or 48 MiB more, whichever is more.
        """
        if self.device == "cuda":
            return (max_batch // ALIGNED_UNIT + 1) * ALIGNED_UNIT
        tight_fit = self.tightest(max_batch)
        needed_bytes = tight_fit.need_bytes(max_batch) + tolerance_bytes(tight_fit.need_bytes(max_batch))

        def is_near(size: int) -> bool:
            """True if a size needs less, even with the steepest growth that the error of the fit allows."""
            return tight_fit.need_bytes(size) + tight_fit.error_per_sample * max(0, size - max_batch) < needed_bytes

        return max(max_batch, largest_fitting(is_near, LARGEST_BATCH)) + 1

    @property
    def no_more_sizes_reason(self) -> str | None:
        """The reason that no further size is probed; None while one may be."""
        if self.largest_fitted >= LARGEST_BATCH:
            return f"no size above {LARGEST_BATCH} is tried"
        if self.largest_fitted >= self.largest_allowed:
            return f"the script's data fills no batch above {self.largest_fitted}"
        return f"a search tries at most {MAX_PROBES} sizes" if self.counted_probes >= MAX_PROBES else None


def _uncounted(peaks: RankPeaks, before: int) -> int:
    """The part of a rank's peak that its phases do not show; `before`, of a smaller size, where it is not known."""
    known = peaks.limit_peak_bytes
    return before if known is None else max(0, known - max(peaks.phase_peaks.values()))


def tolerance_bytes(need_bytes: float) -> float:
    """Return the bytes by which a size may need more than the maximum, which needs `need_bytes`, and stay untried."""
    return max(TOLERANCE_SHARE * need_bytes, TOLERANCE_BYTES)


def state_of_batch_journal(lines: Sequence[BatchLine], *, no_oom: bool = False) -> BatchState:
    """Return the state of a search from the lines of its journal."""
    journal = BatchSnapshot(tuple(lines))
    question = journal.question
    assert question is not None, "a journal begins with its question"
    return BatchState(
        device=question.device,
        world_size=question.world_size,
        limits_bytes=tuple(question.limits_bytes),
        prediction=journal.prediction,
        probes=journal.probes,
        confirmations=journal.confirmations,
        no_oom=no_oom,
    )


@dataclass(frozen=True)
class BatchDecision:
    """The next step, for the journal."""

    step: BatchStep
    end_state: EndState | None = None
    """The state of a search whose step is its end; None for another step."""


def decide(state: BatchState) -> BatchDecision:
    """Return the next step."""
    if len(state.probes) - state.counted_probes >= MAX_VOID_PROBES:
        return _end("failed", f"other processes took memory in {MAX_VOID_PROBES} probes: nothing can be measured here")
    if state.confirmations:
        decision = _after_confirmation(state)
    elif not state.memory_fits:
        decision = _before_any_fitted(state)
    else:
        decision = _towards_boundary(state)
    size = decision.step.batch_size
    if not state.memory_fits or size is None:
        return decision
    tight_fit = state.tightest(size)
    step = msgspec.structs.replace(
        decision.step,
        needs_bytes=round(tight_fit.need_bytes(size)),
        memory_fits=list(state.memory_fits),
        tightest_rank=tight_fit.rank,
    )
    return replace(decision, step=step)


def _probe(batch_size: int, reason: str) -> BatchDecision:
    return BatchDecision(BatchStep(action="probe", batch_size=batch_size, why=reason))


def _confirm(batch_size: int, reason: str) -> BatchDecision:
    return BatchDecision(BatchStep(action=CONFIRM_STEP, batch_size=batch_size, why=reason))


def _end(end_state: EndState, reason: str, batch_size: int | None = None) -> BatchDecision:
    return BatchDecision(BatchStep(action="end", batch_size=batch_size, why=reason), end_state)


def _before_any_fitted(state: BatchState) -> BatchDecision:
    """Probe a small size by the prediction, else the start that it names; then much smaller ones, down to 1."""
    prediction, too_large = state.prediction, state.too_large
    predicted_max = prediction.max_batch if prediction is not None else None
    if too_large == 1:
        return _end("nothing_fits", "a batch of 1 does not fit")
    if too_large is not None:
        contrary = ", contrary to the prediction" if predicted_max else ""
        smaller_size = max(1, too_large // SMALLER_SIZE_DIVISOR)
        return _probe(smaller_size, f"{too_large} does not fit{contrary}: trying a much smaller size")
    if prediction is None or not predicted_max or predicted_max < 2:
        start = prediction.start if prediction is not None else 1
        if predicted_max is not None:
            return _probe(start, f"predicted: at most {predicted_max} fits; trying {start}")
        start_text = "a batch of 1" if start == 1 else "the script's own batch size"
        return _probe(start, f"no prediction: starting at {start_text}")
    predicted_max = min(predicted_max, LARGEST_BATCH)
    small_size = max(1, predicted_max // FIRST_SIZE_DIVISOR, min(prediction.linear_from, predicted_max // 2))
    return _probe(small_size, f"predicted: {predicted_max} fits; trying a small size first, to check the prediction")


def _towards_boundary(state: BatchState) -> BatchDecision:
    """After a size fitted: probe the next one, or confirm once the sizes on both sides are close enough."""
    largest_fitted, too_large = state.largest_fitted, state.too_large
    below_too_large = (too_large or LARGEST_BATCH + 1) - 1
    likely_size = max(largest_fitted, min(state.largest_likely, below_too_large))
    next_size = state.deciding_size(likely_size)
    if too_large is not None and too_large <= next_size:
        return _confirm(likely_size, _confirm_reason(state, likely_size, f"{too_large} does not"))
    if (reason := state.no_more_sizes_reason) is not None:
        words = f"{reason}: confirming {largest_fitted}, the largest that fitted, in a fresh process"
        return _confirm(largest_fitted, words)
    target, predicted_max = state.largest_sure, state.prediction.max_batch if state.prediction is not None else None
    if len(state.probes_that_fit) == 1 and predicted_max:
        # Half-way to the predicted maximum is enough for a first slope, and quick.
        target = min(target, max(largest_fitted + 1, (largest_fitted + predicted_max) // 2))
    if largest_fitted < target <= below_too_large and (too_large or not _should_run_out(state, next_size)):
        return _probe(target, _larger_size_reason(state, target))
    if too_large is not None:
        return _between(state, largest_fitted, too_large)
    return _at_boundary(state, likely_size, next_size)


def _at_boundary(state: BatchState, likely_size: int, next_size: int) -> BatchDecision:
    """Confirm `likely_size`, or probe `next_size`, which shows whether `likely_size` is the largest."""
    if state.no_oom and len(state.probes_that_fit) > 1:
        above = likely_size + 1
        tight_fit = state.tightest(above)
        error = f"give or take {mebibytes(tight_fit.error_at(above))}"
        above_text = f"by the fit {above} would need {tight_fit.need_text(above)}, {error}"
        return _confirm(likely_size, _confirm_reason(state, likely_size, above_text))
    excess_bytes = max(fit.need_bytes(next_size) - fit.limit_bytes for fit in state.memory_fits)
    text = f"the error of the fit leaves open whether {next_size} does"
    if excess_bytes > 0:
        text = f"by the fit {next_size} is {mebibytes(excess_bytes)} too large: running it confirms that"
    return _probe(next_size, f"{likely_size} should fit; {text}")


def _should_run_out(state: BatchState, size: int) -> bool:
    """True if `size` is worth trying at once, although the error of the fit leaves open whether it fits.

    Running out of memory takes a part of a step. A size near the maximum would make the fit surer, but takes two steps.
    """
    if state.no_oom or len(state.probes_that_fit) < 2 or size > LARGEST_BATCH:
        return False
    return any(fit.need_bytes(size) > fit.limit_bytes for fit in state.memory_fits)


def _between(state: BatchState, largest_fitted: int, too_large: int) -> BatchDecision:
    """Probe between a size that fitted and a size that was too large, further apart than the tolerance."""
    if sum(probe.outcome == "oom" for probe in state.probes) == 1:
        size = largest_fitting(lambda size: state.deciding_size(size) < too_large, too_large - 1) + 1
        reason = f"{too_large} does not fit: if {size} fits, the maximum is known within the tolerance"
    else:
        size = (largest_fitted + too_large) // 2
        reason = f"{too_large} does not fit either; trying half-way to {largest_fitted}, which fits"
    return _probe(min(max(size, largest_fitted + 1), too_large - 1), reason)


def _after_confirmation(state: BatchState) -> BatchDecision:
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
    if _is_refuted(state, failed_size):
        # Without this probe a convex curve took up to 54 failed confirmation runs.
        middle = (state.largest_fitted + failed_size) // 2
        reason = f"{failed_size} ran out of memory, contrary to the fit"
        return _probe(middle, f"{reason}: trying half-way to {state.largest_fitted}, which fits")
    distance = state.deciding_size(last_size) - last_size
    # With small samples, half the tolerance is more samples than the batch has.
    step_down = min(max(1, distance // 2), (last_size + 1) // 2)
    # Sizes that were tried since then may have corrected the fit.
    smaller_size = max(1, min(failed_size - 1, last_size - step_down, state.largest_likely))
    process_text = "in a fresh process"
    if any(probe.batch_size == last_size for probe in state.probes_that_fit):
        process_text += ", whose data and allocations differ from those of the probe in which it fitted"
    return _confirm(smaller_size, f"{last_size} ran out of memory {process_text}: {smaller_size} is confirmed instead")


def _is_refuted(state: BatchState, batch_size: int) -> bool:
    """True if the fit is wrong by more than the little that a fresh process needs beyond a warm one.

    By the fit the size that ran out left more than the tolerance, or an earlier confirmation run ran out too.
    """
    if state.largest_fitted + 1 >= batch_size or state.counted_probes >= MAX_PROBES:
        return False
    if not all(fit.surely_fits(batch_size) for fit in state.memory_fits):
        return False  # a size tried since then has corrected the fit
    left_bytes = min(fit.limit_bytes - fit.need_bytes(batch_size) for fit in state.memory_fits)
    return left_bytes > TOLERANCE_BYTES or len(state.confirmations) > 1


def _confirm_reason(state: BatchState, size: int, above_text: str) -> str:
    text = f"{size} fits"
    if size > state.largest_fitted:
        tight_fit = state.tightest(size)
        error = mebibytes(tight_fit.error_at(size))
        text = f"by the fit {size} needs {tight_fit.need_text(size)}, give or take {error},"
    return f"{text} and {above_text}: confirming {size} in a fresh process"


def _larger_size_reason(state: BatchState, target: int) -> str:
    tight_fit = state.tightest(target)
    needs = tight_fit.need_text(target) + (f" on rank {tight_fit.rank}" if state.world_size > 1 else "")
    if len(state.probes_that_fit) > 1:
        error = mebibytes(tight_fit.error_at(target))
        return f"by the fit {target} needs {needs}, and fits even with {error} more"
    is_predicted = state.prediction is not None and state.prediction.bytes_per_sample is not None
    growth = "with the predicted growth per sample" if is_predicted else "even if all memory grows with the batch"
    return f"{growth} {target} fits: it needs {needs}"


BATCH_PHASE = "forward_backward"
"""The phase that grows with the batch."""
BEND_BYTES = 4 << 20
"""A peak up to this far off the line is on the line: measured peaks scatter as much."""


@dataclass(frozen=True)
class SizePrediction:
    """The memory model of a search's training; None, with the reason, if there is none."""

    model: MemoryModel | None
    reason: str = ""

    def against(self, plan: RunPlan, limit_bytes: int) -> Predicted:
        """Predict the largest batch under a limit of bytes per rank."""
        if self.model is None:
            return Predicted(reason=f"no prediction ({self.reason}); sizes are found by trying them")
        max_batch = self.model.max_batch(plan.spec, plan.world_size, limit_bytes)
        # The growth below the maximum: a correction by an earlier run bends at that run's size.
        prediction_below = self._predict_at(plan, max(1, max_batch - 1))
        return Predicted(
            fixed_bytes=prediction_below.fixed_bytes,
            bytes_per_sample=prediction_below.bytes_per_sample,
            max_batch=max_batch,
            linear_from=linear_from(
                lambda size: self._predict_at(plan, size).traced_bytes[BATCH_PHASE], max(1, max_batch)
            ),
            basis=prediction_below.basis,
        )

    def _predict_at(self, plan: RunPlan, batch_size: int) -> Prediction:
        assert self.model is not None
        knobs = {**plan.spec.knobs, "batch_size": batch_size}
        return self.model.predict(replace(plan.spec, knobs=knobs), plan.world_size)


def linear_from(traced_peak: Callable[[int], float], max_batch: int) -> int:
    """Return the smallest batch whose traced peak is on the line through that of `max_batch`.

    A traced peak is convex in the batch, so the sizes off the line are the smallest ones.
    """
    highest_peak = traced_peak(max_batch)
    bytes_per_sample = traced_peak(max_batch + 1) - traced_peak(max_batch)

    def is_bent(size: int) -> bool:
        return traced_peak(size) > highest_peak - (max_batch - size) * bytes_per_sample + BEND_BYTES

    return min(largest_fitting(is_bent, max_batch) + 1, max_batch)


def predict_size(plan: RunPlan, cancelled: threading.Event) -> SizePrediction:
    """Read the plan's memory model from the cache, or trace it now, which takes seconds; `cancelled` ends the trace."""
    why_cut_short = "the trace took too long"

    def note(tracing: TraceProgress) -> None:
        nonlocal why_cut_short
        if tracing.waits_for:
            why_cut_short = f"waited for {tracing.waits_for}"
            print_holder(tracing.waits_for)

    try:
        model = trace_model(plan.spec, plan.device, plan.python, cancelled, plan.device_uuids, note)
        return SizePrediction(model.corrected_for(next(iter(plan.device_names), None)))
    except ProgramCancelled:
        return SizePrediction(None, why_cut_short)
    except UserError as error:
        return SizePrediction(None, error.message)
    except OSError as error:  # as in a full temporary folder: the search goes on without a prediction
        return SizePrediction(None, f"the trace failed: {error.strerror}")

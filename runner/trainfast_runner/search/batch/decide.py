"""Decide the next step of a batch search from its journal, with the reason in words. Touches nothing.

Two sizes give each phase's line (the secant); after the first size the prediction's slope stands in. The search then
tries the size that should not fit, so memory runs out once, and a fresh process confirms the largest size that fits by
the line. A size near the boundary is tried first only while the error of the line leaves the answer open.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec

from trainfast_runner.errors import UserError, lowest
from trainfast_runner.machine.training_python import ProgramCancelled
from trainfast_runner.memory.model import MemoryModel
from trainfast_runner.memory.prediction import Prediction
from trainfast_runner.memory.tracing import TraceProgress, cached_model, trace_model
from trainfast_runner.running.planning import RunPlan
from trainfast_runner.search.batch_journal import (
    CONFIRM_STEP,
    BatchLine,
    BatchSnapshot,
    BatchStep,
    ConfirmationRun,
    Predicted,
    Probe,
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
TOLERANCE_SHARE, TOLERANCE_BYTES = 0.03, 48 << 20
"""A maximum is exact when the smallest size that needs this much more runs out of memory."""
ALIGNED_UNIT = 8
"""Tensor cores work on multiples of 8 (NVIDIA's matrix multiplication guide)."""
FIRST_SIZE_DIVISOR = 8
"""The first size is this part of the predicted maximum: quick, and large enough for a slope."""
SMALLER_SIZE_DIVISOR = 4
"""Chosen, not measured: a first size that does not fit is divided by this until one fits."""


@dataclasses.dataclass(frozen=True)
class BatchDecision:
    """The next step, for the journal."""

    step: BatchStep
    end_state: EndState | None = None
    """The state of a search whose step is its end; None for another step."""


def decide(state: BatchState) -> BatchDecision:
    """Return the next step."""
    if len(state.probes) - state.counted_probes >= MAX_VOID_PROBES:
        return _end("failed", f"other processes took memory in {MAX_VOID_PROBES} probes: nothing can be measured here")
    memory_fits = memory_fits_by_rank(state)
    if state.confirmations:
        decision = _after_confirmation(state, memory_fits)
    elif not memory_fits:
        too_large = state.too_large
        decision = _first_probe(state) if too_large is None else _much_smaller_probe(state, too_large)
    else:
        decision = _towards_boundary(state, memory_fits)
    size = decision.step.batch_size
    if not memory_fits or size is None:
        return decision
    tight_fit = tightest(memory_fits, size)
    step = msgspec.structs.replace(
        decision.step,
        needs_bytes=round(tight_fit.need_bytes(size)),
        memory_fits=list(memory_fits),
        tightest_rank=tight_fit.rank,
    )
    return dataclasses.replace(decision, step=step)


def _probe(batch_size: int, reason: str) -> BatchDecision:
    return BatchDecision(BatchStep(action="probe", batch_size=batch_size, why=reason))


def _confirm(batch_size: int, reason: str) -> BatchDecision:
    return BatchDecision(BatchStep(action=CONFIRM_STEP, batch_size=batch_size, why=reason))


def _end(end_state: EndState, reason: str, batch_size: int | None = None) -> BatchDecision:
    return BatchDecision(BatchStep(action="end", batch_size=batch_size, why=reason), end_state)


def _much_smaller_probe(state: BatchState, too_large: int) -> BatchDecision:
    """Before any size fitted: probe a much smaller size than `too_large`, or end the search."""
    if too_large == 1:
        return _end("nothing_fits", "a batch of 1 does not fit")
    smaller_size = max(1, too_large // SMALLER_SIZE_DIVISOR)
    is_predicted = state.prediction is not None and state.prediction.max_batch
    contrary = ", contrary to the prediction" if is_predicted else ""
    return _probe(smaller_size, f"{too_large} does not fit{contrary}: trying a much smaller size")


def _first_probe(state: BatchState) -> BatchDecision:
    """Probe the first size: a small one by the prediction, or the start that the prediction names without one."""
    prediction = state.prediction
    predicted_max = prediction.max_batch if prediction is not None else None
    if prediction is None or not predicted_max or predicted_max < 2:
        start = prediction.start if prediction is not None else 1
        if predicted_max is not None:
            return _probe(start, f"predicted: at most {predicted_max} fits; trying {start}")
        start_text = "a batch of 1" if start == 1 else "the script's own batch size"
        return _probe(start, f"no prediction: starting at {start_text}")
    predicted_max = min(predicted_max, LARGEST_BATCH)
    small_size = max(1, predicted_max // FIRST_SIZE_DIVISOR, min(prediction.linear_from, predicted_max // 2))
    reason = f"predicted: {predicted_max} fits; trying a small size first, to check the prediction"
    return _probe(small_size, reason)


def _towards_boundary(state: BatchState, memory_fits: tuple[MemoryFit, ...]) -> BatchDecision:
    """After a size fitted: probe the next one, or confirm once the sizes on both sides are close enough."""
    largest_fitted = state.largest_fitted
    too_large = state.too_large
    fitted_count = len(state.probes_that_fit)
    largest_sure = _largest_sure_size(memory_fits)
    likely_size = max(
        largest_fitted, min(_largest_likely_size(state, memory_fits), (too_large or LARGEST_BATCH + 1) - 1)
    )
    next_size = deciding_size(state, memory_fits, likely_size)
    if too_large is not None and too_large <= next_size:
        return _confirm(likely_size, _confirm_reason(memory_fits, largest_fitted, likely_size, f"{too_large} does not"))
    if (reason := no_more_sizes_reason(state, largest_fitted)) is not None:
        return _confirm(
            largest_fitted, f"{reason}: confirming {largest_fitted}, the largest that fitted, in a fresh process"
        )
    target = min(largest_sure, _second_size(state)) if fitted_count == 1 else largest_sure
    if largest_fitted < target < (too_large or LARGEST_BATCH + 1) and (
        too_large or not _should_run_out(state, memory_fits, next_size)
    ):
        return _probe(target, _larger_size_reason(state, tightest(memory_fits, target), target))
    if too_large is not None:
        return _between(state, memory_fits, largest_fitted, too_large)
    return _at_boundary(state, memory_fits, largest_fitted, likely_size, next_size)


def no_more_sizes_reason(state: BatchState, largest_fitted: int) -> str | None:
    """Return the reason no further size is probed; None while one may be."""
    if largest_fitted >= LARGEST_BATCH:
        return f"no size above {LARGEST_BATCH} is tried"
    if largest_fitted >= state.largest_allowed:
        return f"the script's data fills no batch above {largest_fitted}"
    return f"a search tries at most {MAX_PROBES} sizes" if state.counted_probes >= MAX_PROBES else None


def _at_boundary(
    state: BatchState, memory_fits: tuple[MemoryFit, ...], largest_fitted: int, likely_size: int, next_size: int
) -> BatchDecision:
    """Confirm `likely_size`, or probe `next_size`, which shows whether `likely_size` is the largest."""
    tight_fit = tightest(memory_fits, likely_size + 1)
    needs = tight_fit.need_text(likely_size + 1)
    if state.no_oom and len(state.probes_that_fit) > 1:
        error = f"give or take {mebibytes(tight_fit.error_at(likely_size + 1))}"
        above_text = f"by the fit {likely_size + 1} would need {needs}, {error}"
        return _confirm(likely_size, _confirm_reason(memory_fits, largest_fitted, likely_size, above_text))
    excess_bytes = max(fit.need_bytes(next_size) - fit.limit_bytes for fit in memory_fits)
    text = f"{likely_size} should fit; the error of the fit leaves open whether {next_size} does"
    if excess_bytes > 0:
        too_much = f"by the fit {next_size} is {mebibytes(excess_bytes)} too large"
        text = f"{likely_size} should fit; {too_much}: running it confirms that"
    return _probe(next_size, text)


def _largest_sure_size(memory_fits: tuple[MemoryFit, ...]) -> int:
    """Return the largest size that fits on every rank even if the fit is off by its whole error."""
    return largest_fitting(lambda size: all(fit.surely_fits(size) for fit in memory_fits), LARGEST_BATCH)


def _largest_likely_size(state: BatchState, memory_fits: tuple[MemoryFit, ...]) -> int:
    """Return the largest size that fitted, or that surely fits by a fit of two sizes or more."""
    # A fit of a single size has no measured slope, so no other size is sure.
    largest_sure = _largest_sure_size(memory_fits) if len(state.probes_that_fit) > 1 else 0
    return max(state.largest_fitted, largest_sure)


def _should_run_out(state: BatchState, memory_fits: tuple[MemoryFit, ...], size: int) -> bool:
    """True if `size` is worth trying at once, although the error of the fit leaves open whether it fits.

    Running out of memory takes a part of a step. A size near the maximum would make the fit surer, but takes two steps.
    """
    if state.no_oom or len(state.probes_that_fit) < 2 or size > LARGEST_BATCH:
        return False
    return any(fit.need_bytes(size) > fit.limit_bytes for fit in memory_fits)


def _second_size(state: BatchState) -> int:
    """Return the largest second size: half-way to the predicted maximum is enough for a first slope, and quick."""
    predicted_max = state.prediction.max_batch if state.prediction is not None else None
    return (
        max(state.largest_fitted + 1, (state.largest_fitted + predicted_max) // 2) if predicted_max else LARGEST_BATCH
    )


def _between(
    state: BatchState, memory_fits: tuple[MemoryFit, ...], largest_fitted: int, too_large: int
) -> BatchDecision:
    """Probe between a size that fitted and a size that was too large, further apart than the tolerance."""
    if sum(probe.outcome == "oom" for probe in state.probes) == 1:
        size = largest_fitting(lambda size: deciding_size(state, memory_fits, size) < too_large, too_large - 1) + 1
        reason = f"{too_large} does not fit: if {size} fits, the maximum is known within the tolerance"
    else:
        size = (largest_fitted + too_large) // 2
        reason = f"{too_large} does not fit either; trying half-way to {largest_fitted}, which fits"
    return _probe(min(max(size, largest_fitted + 1), too_large - 1), reason)


def _after_confirmation(state: BatchState, memory_fits: tuple[MemoryFit, ...]) -> BatchDecision:
    """End the search if the last confirmation run finished; if memory ran out, confirm or probe a smaller size."""
    last_run = state.confirmations[-1]
    if last_run.state == "finished":
        return _end("answered", f"a fresh process finished with {last_run.batch_size}", last_run.batch_size)
    if last_run.state != "oom":
        return _end(
            "failed", f"the confirmation run of {last_run.batch_size} ended {last_run.state}: {last_run.reason}"
        )
    if last_run.batch_size == 1:
        return _end("nothing_fits", "a batch of 1 does not fit in a fresh process")
    failed_size = min(last_run.batch_size, state.too_large or last_run.batch_size)
    if _is_refuted(state, memory_fits, failed_size):
        # Without this probe a convex curve took up to 54 failed confirmation runs.
        middle = (state.largest_fitted + failed_size) // 2
        reason = f"{failed_size} ran out of memory, contrary to the fit"
        return _probe(middle, f"{reason}: trying half-way to {state.largest_fitted}, which fits")
    distance = deciding_size(state, memory_fits, last_run.batch_size) - last_run.batch_size
    # Sizes that were tried since then may have corrected the fit.
    likely_size = _largest_likely_size(state, memory_fits)
    # With small samples, half the tolerance is more samples than the batch has.
    step_down = min(max(1, distance // 2), (last_run.batch_size + 1) // 2)
    smaller_size = max(1, min(failed_size - 1, last_run.batch_size - step_down, likely_size))
    process_text = "in a fresh process"
    if any(probe.batch_size == last_run.batch_size for probe in state.probes_that_fit):
        process_text += ", whose data and allocations differ from those of the probe in which it fitted"
    return _confirm(
        smaller_size, f"{last_run.batch_size} ran out of memory {process_text}: {smaller_size} is confirmed instead"
    )


def _is_refuted(state: BatchState, memory_fits: tuple[MemoryFit, ...], batch_size: int) -> bool:
    """True if the fit is wrong by more than the little that a fresh process needs beyond a warm one.

    By the fit the size that ran out left more than the tolerance, or an earlier confirmation run ran out too.
    """
    if state.largest_fitted + 1 >= batch_size or state.counted_probes >= MAX_PROBES:
        return False
    if not all(fit.surely_fits(batch_size) for fit in memory_fits):
        return False  # a size tried since then has corrected the fit
    left_bytes = min(fit.limit_bytes - fit.need_bytes(batch_size) for fit in memory_fits)
    return left_bytes > TOLERANCE_BYTES or len(state.confirmations) > 1


def deciding_size(state: BatchState, memory_fits: tuple[MemoryFit, ...], max_batch: int) -> int:
    """Return the smallest size that must run out of memory for `max_batch` to be the maximum.

    On a GPU the next aligned size; on a CPU the size that needs 3 % or 48 MiB more, whichever is more.
    """
    if state.device == "cuda":
        return (max_batch // ALIGNED_UNIT + 1) * ALIGNED_UNIT
    tight_fit = tightest(memory_fits, max_batch)
    needed_bytes = tight_fit.need_bytes(max_batch) + tolerance_bytes(tight_fit.need_bytes(max_batch))

    def is_near(size: int) -> bool:
        """True if a size needs less, even with the steepest growth that the error of the fit allows."""
        return tight_fit.need_bytes(size) + tight_fit.error_per_sample * max(0, size - max_batch) < needed_bytes

    return max(max_batch, largest_fitting(is_near, LARGEST_BATCH)) + 1


def tolerance_bytes(need_bytes: float) -> float:
    """Return the bytes by which a size may need more than the maximum, which needs `need_bytes`, and stay untried."""
    return max(TOLERANCE_SHARE * need_bytes, TOLERANCE_BYTES)


def _confirm_reason(memory_fits: tuple[MemoryFit, ...], largest_fitted: int, size: int, above_text: str) -> str:
    text = f"{size} fits"
    if size > largest_fitted:
        tight_fit = tightest(memory_fits, size)
        needs = tight_fit.need_text(size)
        text = f"by the fit {size} needs {needs}, give or take {mebibytes(tight_fit.error_at(size))},"
    return f"{text} and {above_text}: confirming {size} in a fresh process"


def _larger_size_reason(state: BatchState, tight_fit: MemoryFit, target: int) -> str:
    needs = tight_fit.need_text(target)
    rank_text = f" on rank {tight_fit.rank}" if state.world_size > 1 else ""
    if len(state.probes_that_fit) > 1:
        error = mebibytes(tight_fit.error_at(target))
        return f"by the fit {target} needs {needs}{rank_text}, and fits even with {error} more"
    is_predicted = state.prediction is not None and state.prediction.bytes_per_sample is not None
    growth = "with the predicted growth per sample" if is_predicted else "even if all memory grows with the batch"
    return f"{growth} {target} fits: it needs {needs}{rank_text}"


LARGEST_BATCH = 1 << 20
"""The largest batch size that is tried."""


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

    @property
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


def memory_fits_by_rank(state: BatchState) -> tuple[MemoryFit, ...]:
    """Return the fit of each rank; empty before any size fitted."""
    slope = state.prediction.bytes_per_sample if state.prediction is not None else None
    fits = _fits_with_slope(state, slope)
    if state.too_large is None or len(state.probes_that_fit) != 1:
        return fits
    # By a wrong prediction's slope the size that ran out would fit.
    is_refuted = all(fit.surely_fits(state.too_large) for fit in fits)
    return _fits_with_slope(state, None) if is_refuted else fits


def _fits_with_slope(state: BatchState, slope: float | None) -> tuple[MemoryFit, ...]:
    memory_fits = []
    for rank in range(state.world_size):
        peaks = _counted_peaks(state, rank).by_size
        limit_bytes = limit_bytes_of(state, rank)
        if peaks and limit_bytes is not None:
            fit = fit_lines(peaks, state.device, slope)
            memory_fits.append(MemoryFit(rank=rank, limit_bytes=limit_bytes, **msgspec.structs.asdict(fit)))
    return tuple(memory_fits)


def tightest(memory_fits: Sequence[MemoryFit], batch_size: int) -> MemoryFit:
    """Return the fit that leaves the least at this batch size."""
    return min(memory_fits, key=lambda fit: fit.limit_bytes - fit.need_bytes(batch_size))


def uncounted_bytes(state: BatchState, rank: int) -> int:
    """Return the bytes the rank's limit counts beyond its peak, at the largest size where both were measured."""
    return _counted_peaks(state, rank).uncounted_bytes


class _CountedPeaks(NamedTuple):
    """A rank's peaks as its limit counts them, by batch size and phase, and the part that the phases do not show."""

    by_size: dict[int, dict[str, int]]
    uncounted_bytes: int


def _counted_peaks(state: BatchState, rank: int) -> _CountedPeaks:
    by_size: dict[int, dict[str, int]] = {}
    uncounted_bytes = 0
    for probe in state.probes_that_fit:
        for peaks in probe.ranks:
            if peaks.rank == rank and peaks.phase_peaks:
                if peaks.limit_peak_bytes is not None:
                    uncounted_bytes = max(0, peaks.limit_peak_bytes - max(peaks.phase_peaks.values()))
                by_size[probe.batch_size] = {phase: peak + uncounted_bytes for phase, peak in peaks.phase_peaks.items()}
    return _CountedPeaks(by_size, uncounted_bytes)


def limit_bytes_of(state: BatchState, rank: int) -> int | None:
    """Return the rank's limit in bytes, or its last reported available memory if that is less; None without either."""
    available_bytes = [
        peaks.available_bytes
        for probe in state.probes
        for peaks in probe.ranks
        if peaks.rank == rank and peaks.available_bytes is not None
    ]
    return lowest((limit_of_rank(state.limits_bytes, rank), *available_bytes[-1:]))


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
    reason = "the trace took too long"

    def note(tracing: TraceProgress) -> None:
        nonlocal reason
        if tracing.waits_for:
            reason = f"waited for {tracing.waits_for}"
            print_holder(tracing.waits_for)

    try:
        model = cached_model(plan.spec, plan.device, plan.python)
        if model is None:
            model = trace_model(plan.spec, plan.device, plan.python, cancelled, plan.device_uuids, note)
        return SizePrediction(model.corrected_for(next(iter(plan.device_names), None)))
    except ProgramCancelled:
        return SizePrediction(None, reason)
    except UserError as error:
        return SizePrediction(None, error.message)
    except OSError as error:  # as in a full temporary folder: the search goes on without a prediction
        return SizePrediction(None, f"the trace failed: {error.strerror}")

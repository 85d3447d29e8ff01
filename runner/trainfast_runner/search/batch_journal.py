"""The journal of a batch search: its question, steps, probes and answer. Sizes are bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import msgspec

from trainfast_runner.errors import lowest
from trainfast_runner.records.json_lines import newest
from trainfast_runner.records.result import STRICT_SPEED, Doubt, OomChange
from trainfast_runner.records.run_directory import read_result
from trainfast_runner.records.run_file import BatchWidths
from trainfast_runner.results.doubts import doubts
from trainfast_runner.search.journal import (
    Conducted,
    JournalLines,
    Line,
    Paused,
    Resumed,
    SearchEnded,
    SearchQuestion,
    SharedLine,
    Waiting,
    fields_of,
    first_fields,
)
from trainfast_runner.worker.shared.memory_limit import limit_of_rank

CONFIRM_STEP: Final = "prove"
"""The action of a step that starts a confirmation run; best-fit has its own role `CONFIRM`."""
NOISE_BYTES = {"cpu": 4 << 20, "cuda": 48 << 20}
"""Scatter of a measured peak, in bytes: a CPU's C library keeps small blocks, a GPU's allocator works in large ones."""
SLOPE_SHARE = {"cpu": 0.015, "cuda": 0.03}
"""Error of a slope between two sizes, as a share: on a CPU small sizes were 0 to 2 % steeper than large ones."""
PREDICTED_SHARE = 0.15
"""Error of a predicted slope, as a share."""
CONSTANT_PHASE = "optimizer"
"""The phase whose peak does not grow with the batch: weights, gradients and states."""
MAX_SIZE_RATIO = 0.75
"""Two sizes give a slope if the smaller is at most this share of the larger."""


class BatchQuestion(SearchQuestion, frozen=True, kw_only=True, tag="asked"):
    """The question of a batch search. A script's has no `device_uuids`.

    `limits_bytes` is empty on a GPU without `memory_limit`, where each rank reports its own.
    """

    world_size: int = 1
    limit_words: str = ""
    """The source of the limits, in words."""

    @property
    def measured_under(self) -> str | None:
        """The condition under which the search measures speed; None if the condition does not change speed."""
        return STRICT_SPEED if self.device == "cpu" else None


class Predicted(Line, frozen=True, kw_only=True, tag="predicted"):
    """The memory model's line for the fullest rank: `fixed_bytes + batch_size * bytes_per_sample`.

    Without a prediction all figures are None.
    """

    fixed_bytes: int | None = None
    bytes_per_sample: int | None = None
    max_batch: int | None = None
    """The largest batch that is predicted to fit; 0 if none is."""
    start: int = 1
    """The first size of a search without a prediction."""
    basis: str = ""
    """The source of the prediction, in words."""
    reason: str = ""
    """The reason that there is no prediction."""


class BatchStep(Line, frozen=True, kw_only=True, tag="next"):
    """The next step and its reason."""

    action: str
    """probe, prove (a confirmation run) or end; a journal of another version may have other words."""
    batch_size: int | None = None
    why: str
    end_state: str | None = None
    """An `EndState`: that of the search which this step ends; None for another step."""


class RankPeaks(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's peaks in a probe or a confirmation run."""

    rank: int
    phase_peaks: dict[str, int] = {}
    """Peak bytes by phase of a step."""
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    limit_peak_bytes: int | None = None
    """The peak as the limit counts it (on a CPU reserved address space, a little more than resident memory); None on a
    GPU, and when an earlier probe was higher."""
    available_bytes: int | None = msgspec.field(default=None, name="room_bytes")
    """The rank's available memory."""
    alloc_retries: int | None = None
    widths: BatchWidths | None = None
    """Widths of a script's batches; None for a preset, whose longest samples always come first."""


class Tried(Line, frozen=True, kw_only=True):
    """A batch size that was tried, and its figures."""

    batch_size: int
    run_id: str
    seconds: float
    reason: str = ""
    """The reason that there are no figures."""
    peak_allocated_bytes: int | None = None
    ranks: list[RankPeaks] = []
    """The peaks of each rank; a rank without a finished step is left out."""
    samples_per_s: float | None = None
    """The rate of all ranks together."""
    step_ms: float | None = None


class Probe(Tried, frozen=True, kw_only=True, tag="probe"):
    """A size tried in a few steps. The peaks are those of `rank`: after an oom, as far as reached by then."""

    outcome: str
    """fits, oom, or void: another process took memory, and the probe is repeated."""
    fills_data: bool = False
    """True for the largest size that a script's data fills."""
    rank: int | None = None
    """The rank of the highest peak; after an oom the one that ran out of memory."""
    phase: str | None = None
    """The phase of the highest peak; after an oom the one in which memory ran out."""
    phase_peaks: dict[str, int] = {}
    peak_reserved_bytes: int | None = None
    alloc_retries: int | None = None


class ConfirmationRun(Tried, frozen=True, kw_only=True, tag="proof"):
    """A confirmation run: a normal run of a fresh process, with its peaks over all steps, warm-up included."""

    state: str
    """The end state of the run."""
    missing_bytes: int | None = None
    """The least that was missing when memory ran out on a GPU; None if unknown."""
    refutes: list[int] = []
    """The sizes that fitted in a probe but no longer count, because this run ran out of memory."""


class BatchAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer; bytes are those of the tightest rank."""

    max_batch: int
    samples_per_s: float | None = None
    """The confirmation run's rate, summed over ranks."""
    aligned_batch: int | None = None
    """The largest multiple of 8 (of 64 from 512 on) within `max_batch`; None below 8."""
    recommended_batch: int | None
    """The largest batch that leaves the margins of `recommended_why`; None if no size does."""
    recommended_why: str = ""
    fastest_batch: int | None = None
    """The size with the highest rate, probed or confirmed; None on a CPU, whose speeds do not rank."""
    fastest_samples_per_s: float | None = None
    limit_bytes: int | None = None
    headroom_bytes: int | None = None
    """The rest of the limit at `max_batch`, as measured, else by the fit."""
    fixed_bytes: int | None = None
    """Start of the line that limits the batch."""
    bytes_per_sample: int | None = None
    """Slope of that line."""
    phase: str | None = None
    """Phase of that line."""
    tightest_rank: int = 0
    confirmation_run_id: str | None = msgspec.field(default=None, name="proof_run_id")
    certainty: str = ""
    """Why a larger batch does not fit: the size that ran out of memory, or the fit; and the sizes not tried."""
    too_large: int | None = None
    """The smallest larger size that ran out of memory; None if none did."""
    widths: BatchWidths | None = None
    """The narrowest batch of the search and the widest of the confirmation run; None if no width was seen."""
    widths_note: str = ""
    """The widths that the answer holds for, in words; empty where all batches are equally wide."""


class Change(OomChange, frozen=True, kw_only=True):
    """A change that would make a batch of 1 fit, or one of the closest ones if none is enough.

    In the journal `saves` has the name `words`.
    """

    saves: str = msgspec.field(name="words")
    costs: str = ""


class BatchEnded(SearchEnded, frozen=True, kw_only=True, tag="ended"):
    """The end of a batch search; if nothing fits, with the missing bytes and the changes that would help."""

    answer: BatchAnswer | None = None
    missing_bytes: int | None = None
    changes: list[Change] = []


BatchLine = BatchQuestion | Predicted | BatchStep | Probe | ConfirmationRun | BatchEnded | SharedLine
"""A line of a batch search's journal."""


@dataclass(frozen=True)
class PhaseFit:
    """`fixed_bytes + batch_size * bytes_per_sample` of one phase."""

    phase: str
    fixed_bytes: float
    bytes_per_sample: float

    def at(self, batch_size: float) -> float:
        """Return the bytes at the peak of this phase."""
        return self.fixed_bytes + batch_size * self.bytes_per_sample


@dataclass(frozen=True)
class MemoryFit:
    """Memory that one rank needs by batch size, as its limit counts it: a line a phase, and the error of the peak."""

    rank: int
    limit_bytes: int
    lines: list[PhaseFit]
    error_bytes: float = 0.0
    """The largest error at the batch size `anchor`."""
    error_per_sample: float = 0.0
    """Growth of the error with every sample away from `anchor`."""
    anchor: int = 0
    """The largest batch size that was measured."""

    def need_bytes(self, batch_size: float) -> float:
        """Return the peak of the step: that of the highest phase at this batch size."""
        return max(line.at(batch_size) for line in self.lines)

    def error_at(self, batch_size: float) -> float:
        """Return the largest error of `need_bytes`, in bytes."""
        return self.error_bytes + self.error_per_sample * abs(batch_size - self.anchor)

    def left_bytes(self, batch_size: int) -> float:
        """Return the rest of the limit; negative if the batch does not fit."""
        return self.limit_bytes - self.need_bytes(batch_size)

    def surely_fits(self, batch_size: int) -> bool:
        """True if the batch fits even if the need is too low by its whole error."""
        return self.left_bytes(batch_size) >= self.error_at(batch_size)


def fit_lines(
    points: Mapping[int, Mapping[str, int]], device: str, predicted_slope: float | None, rank: int, limit_bytes: int
) -> MemoryFit:
    """Fit a line per phase to the peaks of a rank, `points`: bytes by phase, by batch size.

    Peak memory is affine in the batch size per phase, not overall (`max(optimizer step, F + k * batch)`). Each line
    goes through the largest size; its slope is the secant from the largest size well below. With one size the slope is
    the predicted one; without a prediction all memory is assumed to grow with the batch.
    """
    *smaller_sizes, largest_size = sorted(points)
    sizes_below = [size for size in smaller_sizes if size <= MAX_SIZE_RATIO * largest_size] or smaller_sizes[:1]
    peaks = points[largest_size]
    if sizes_below:
        base, distance = points[sizes_below[-1]], largest_size - sizes_below[-1]
        slopes = {phase: max(0.0, (peak - base.get(phase, peak)) / distance) for phase, peak in peaks.items()}
        error = _secant_error(device, distance, max(slopes.values()), predicted_slope, is_first=len(points) == 2)
    else:
        assumed = {
            phase: predicted_slope if predicted_slope is not None else peaks[phase] / largest_size for phase in peaks
        }
        slopes = {phase: 0.0 if phase == CONSTANT_PHASE else slope for phase, slope in assumed.items()}
        error = PREDICTED_SHARE * (predicted_slope or 0.0)
    return MemoryFit(
        rank=rank,
        limit_bytes=limit_bytes,
        lines=[
            PhaseFit(phase=phase, fixed_bytes=peak - slopes[phase] * largest_size, bytes_per_sample=slopes[phase])
            for phase, peak in peaks.items()
        ],
        error_bytes=NOISE_BYTES[device],
        error_per_sample=error,
        anchor=largest_size,
    )


def _secant_error(
    device: str, size_distance: int, slope: float, predicted_slope: float | None, *, is_first: bool
) -> float:
    """Error of a slope between sizes `size_distance` apart, in bytes per sample.

    On a CPU a prediction that agrees leaves half of the scatter. If the prediction is clearly steeper, the first secant
    may be too flat by the difference: a peak is convex in the batch.
    """
    scatter = NOISE_BYTES[device] / size_distance
    measured_error = 2 * scatter + SLOPE_SHARE[device] * slope
    if predicted_slope is None:
        return measured_error
    if abs(predicted_slope - slope) <= PREDICTED_SHARE * predicted_slope:
        return scatter / 2 if device == "cpu" else measured_error
    return max(measured_error, predicted_slope - slope) if is_first else measured_error


@dataclass(frozen=True)
class BatchSnapshot(JournalLines[BatchQuestion, BatchStep, BatchEnded]):
    """A batch search at one moment: the lines of its journal by kind, and what a screen shows of them."""

    LINE_TYPE = BatchLine
    KINDS = BatchQuestion, BatchStep, BatchEnded
    lines: tuple[BatchLine, ...] = ()

    @cached_property
    def prediction(self) -> Predicted | None:
        """The predicted memory; None before it is written."""
        return newest(self.lines, Predicted)

    @cached_property
    def probes(self) -> tuple[Probe, ...]:
        """Probes in the order they were made, void ones included."""
        return self.all_of(Probe)

    @cached_property
    def probes_that_fit(self) -> list[Probe]:
        """Probes that fitted, the smallest first."""
        return sorted((probe for probe in self.probes if probe.outcome == "fits"), key=lambda probe: probe.batch_size)

    @cached_property
    def confirmations(self) -> tuple[ConfirmationRun, ...]:
        """Confirmation runs in the order they were made."""
        return self.all_of(ConfirmationRun)

    def refuted_by(self, probe: Probe) -> ConfirmationRun | None:
        """Return the confirmation run that ran out of memory at this size or a smaller one; None if it counts."""
        refuting = (run for run in self.confirmations if probe.batch_size in run.refutes)
        return next(refuting, None) if probe.outcome == "fits" else None

    @property
    def answer(self) -> BatchAnswer | None:
        """The answer; None before the search has one."""
        return None if self.ended is None else self.ended.answer

    @cached_property
    def is_decided(self) -> bool:
        """False if the newest step is done and the next is not decided yet."""
        steps = (line for line in reversed(self.lines) if isinstance(line, BatchStep | Probe | ConfirmationRun))
        return isinstance(next(steps, None), BatchStep | None)

    @property
    def asked(self) -> BatchQuestion:
        """The question, with which a journal begins."""
        assert self.question is not None
        return self.question

    @cached_property
    def too_large(self) -> int | None:
        """The smallest size that ran out of memory in a probe."""
        return min((probe.batch_size for probe in self.probes if probe.outcome == "oom"), default=None)

    @cached_property
    def fits(self) -> tuple[MemoryFit, ...]:
        """The fit of each rank; empty before any size fitted, and without a readable question."""
        if self.question is None or self.question.device not in NOISE_BYTES:
            return ()
        fits = self._fits_with_slope(None if self.prediction is None else self.prediction.bytes_per_sample)
        if self.too_large is None or len(self.probes_that_fit) != 1:
            return fits
        # By a wrong prediction's slope the size that ran out would fit.
        is_refuted = all(fit.surely_fits(self.too_large) for fit in fits)
        return self._fits_with_slope(None) if is_refuted else fits

    def _fits_with_slope(self, slope: float | None) -> tuple[MemoryFit, ...]:
        fits = []
        for rank in range(self.asked.world_size):
            (points, _), limit_bytes = self._points_of(rank), self.limit_bytes(rank)
            if points and limit_bytes is not None:
                fits.append(fit_lines(points, self.asked.device, slope, rank, limit_bytes))
        return tuple(fits)

    def _points_of(self, rank: int) -> tuple[dict[int, dict[str, int]], int]:
        """Return a rank's peaks as its limit counts them, by phase, by size that fitted; and the bytes beyond the last.

        Unknown bytes beyond the peaks are those of the size before.
        """
        points, beyond_bytes = {}, 0
        for probe in self.probes_that_fit:
            for peaks in probe.ranks:
                if peaks.rank == rank and peaks.phase_peaks and probe.batch_size > 0:
                    if (limit_peak_bytes := self._limit_peak_bytes(peaks)) is not None:
                        beyond_bytes = max(0, limit_peak_bytes - max(peaks.phase_peaks.values()))
                    points[probe.batch_size] = {name: size + beyond_bytes for name, size in peaks.phase_peaks.items()}
        return points, beyond_bytes

    def _limit_peak_bytes(self, peaks: RankPeaks) -> int | None:
        is_gpu = self.question is not None and self.question.device == "cuda"
        return peaks.peak_reserved_bytes if is_gpu else peaks.limit_peak_bytes

    def counted_bytes(self, peaks: RankPeaks) -> int | None:
        """Return a rank's peak as its limit counts it, by estimate if only the peak is known; None if neither is."""
        counted_bytes, peak_bytes = self._limit_peak_bytes(peaks), peaks.peak_allocated_bytes
        if counted_bytes is None and peak_bytes is not None:
            counted_bytes = peak_bytes + self._points_of(peaks.rank)[1]
        return counted_bytes

    def limit_bytes(self, rank: int) -> int | None:
        """Return the rank's limit in bytes, or its last reported available memory if that is less; None without."""
        seen = [peaks.available_bytes for probe in self.probes for peaks in probe.ranks if peaks.rank == rank]
        available_bytes = [size_bytes for size_bytes in seen if size_bytes is not None]
        return lowest((limit_of_rank(self.asked.limits_bytes, rank), *available_bytes[-1:]))

    def tightest(self, batch_size: int) -> MemoryFit:
        """Return the fit that leaves the least at this batch size."""
        return min(self.fits, key=lambda fit: fit.left_bytes(batch_size))

    @cached_property
    def tightest_fit(self) -> MemoryFit | None:
        """The fit that leaves the least at the answer, else at the size of the newest step; None before any."""
        size = self.answer.max_batch if self.answer is not None else None
        size = size or (self.newest_step.batch_size if self.newest_step is not None else None)
        return self.tightest(size or self.probes_that_fit[-1].batch_size) if self.fits else None

    @cached_property
    def since_ns(self) -> int | None:
        """CLOCK_MONOTONIC when the current step or wait began; before the first step, when the conductor began."""
        starts = BatchStep | Conducted | Paused | Waiting | Resumed
        return next((line.t_ns for line in reversed(self.lines) if isinstance(line, starts)), None)


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
    journal = BatchSnapshot.read(directory)
    question, prediction, end, answer = journal.asked, journal.prediction, journal.ended, journal.answer
    fastest = widths = None
    if answer is not None and answer.fastest_batch is not None:
        fastest = {"batch_size": answer.fastest_batch, "samples_per_s": answer.fastest_samples_per_s}
    if answer is not None and answer.widths is not None:
        widths = {**msgspec.structs.asdict(answer.widths), "note": answer.widths_note or None}
    return {
        **first_fields(question, end),
        **fields_of(answer, "max_batch", "samples_per_s", "aligned_batch", "recommended_batch"),
        "measured_under": question.measured_under,
        "doubts": _doubts(directory, question, answer),
        "recommended_reason": answer.recommended_why if answer else None,
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


def _doubts(directory: Path, question: BatchQuestion, answer: BatchAnswer | None) -> list[Doubt]:
    """The doubts about the speeds: the condition of all of them, then those of the confirmation run."""
    run_id = None if answer is None else answer.confirmation_run_id
    result = None if run_id is None else read_result(directory.parent.parent / "runs" / run_id)
    found = {doubt.kind: doubt for doubt in (doubts(result) if result is not None else ())}
    if (condition := question.measured_under) is not None:
        found["strict_malloc"] = Doubt(kind="strict_malloc", text=f"speeds were measured under {condition}")
    return [*found.values()]


def _probe(probe: Probe, journal: BatchSnapshot) -> dict[str, Any]:
    """One probe; `refuted_by` is the confirmation run that ran out of memory although this size had fitted."""
    refuting_run = journal.refuted_by(probe)
    return {**fields_of(probe, *PROBE_FIELDS), "refuted_by": None if refuting_run is None else refuting_run.run_id}

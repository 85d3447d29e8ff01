"""The journal of a batch search: its question, steps, probes and answer. Sizes are bytes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import msgspec

from trainfast_runner.records.json_lines import newest
from trainfast_runner.records.result import STRICT_SPEED, Doubt, OomChange
from trainfast_runner.records.run_directory import read_result
from trainfast_runner.records.run_file import BatchWidths
from trainfast_runner.results.doubts import doubts
from trainfast_runner.search.journal import (
    Conducted,
    JournalFollower,
    JournalLines,
    Line,
    Paused,
    Resumed,
    SearchEnded,
    SearchQuestion,
    Waiting,
    current_end,
    fields_of,
    first_fields,
    read_journal,
)
from trainfast_runner.units import mebibytes

CONFIRM_STEP: Final = "prove"
"""The action of a step that starts a confirmation run; best-fit has its own role `CONFIRM`."""


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


class PhaseFit(msgspec.Struct, frozen=True, kw_only=True):
    """`fixed_bytes + batch_size * bytes_per_sample` of one phase."""

    phase: str
    fixed_bytes: float
    bytes_per_sample: float

    def at(self, batch_size: float) -> float:
        """Return the bytes at the peak of this phase."""
        return self.fixed_bytes + batch_size * self.bytes_per_sample


class MemoryFit(msgspec.Struct, frozen=True, kw_only=True):
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

    def need_text(self, batch_size: int) -> str:
        """Return the need at this batch size and the limit: `60 MiB of 64 MiB`."""
        return f"{mebibytes(self.need_bytes(batch_size))} of {mebibytes(self.limit_bytes)}"

    def surely_fits(self, batch_size: int) -> bool:
        """True if the batch fits even if the need is too low by its whole error."""
        return self.need_bytes(batch_size) + self.error_at(batch_size) <= self.limit_bytes


class BatchStep(Line, frozen=True, kw_only=True, tag="next"):
    """The next step and its reason."""

    action: str
    """probe, prove (a confirmation run) or end; a journal of another version may have other words."""
    batch_size: int | None = None
    why: str
    memory_fits: list[MemoryFit] = msgspec.field(default_factory=list, name="fits")
    """The current fit of each rank."""
    tightest_rank: int | None = None
    end_state: str | None = None
    """An `EndState`: that of the search which this step ends; None for another step."""


class BatchLaunched(Line, frozen=True, kw_only=True, tag="launched"):
    """A run of the search was started. `role` is probe or proof."""

    run_id: str
    role: str


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
    refutes: list[int] = []
    """The sizes that fitted in a probe but no longer count, because this run ran out of memory."""


class Margin(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the memory that the recommended batch leaves free, and its reason."""

    margin_bytes: int
    why: str


class BatchAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer; bytes are those of the tightest rank."""

    max_batch: int
    samples_per_s: float | None = None
    """The confirmation run's rate, summed over ranks."""
    aligned_batch: int | None = None
    """The largest multiple of 8 (of 64 from 512 on) within `max_batch`; None below 8."""
    recommended_batch: int | None
    """The largest batch that leaves the margins; None if no size does."""
    recommended_why: str = ""
    margins: list[Margin] = []
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


BatchLine = (
    BatchQuestion
    | Conducted
    | Predicted
    | BatchStep
    | BatchLaunched
    | Probe
    | ConfirmationRun
    | Paused
    | Waiting
    | Resumed
    | BatchEnded
)
"""A line of a batch search's journal."""


@dataclass(frozen=True)
class BatchSnapshot(JournalLines):
    """A batch search at one moment: the lines of its journal by kind, and what a screen shows of them."""

    lines: tuple[BatchLine, ...]

    @cached_property
    def question(self) -> BatchQuestion | None:
        """The first line; None while it is unwritten."""
        return newest(self.lines, BatchQuestion)

    @cached_property
    def prediction(self) -> Predicted | None:
        """The predicted memory; None before it is written."""
        return newest(self.lines, Predicted)

    @cached_property
    def newest_step(self) -> BatchStep | None:
        """The current step and its reason; the last step once the search has ended."""
        return newest(self.lines, BatchStep)

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

    @cached_property
    def ended(self) -> BatchEnded | None:
        """The end; None while the search goes on or was continued."""
        return current_end(self.lines, BatchEnded)

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
        lines = (line for line in reversed(self.lines) if isinstance(line, BatchLaunched | Conducted | BatchEnded))
        last_line = next(lines, None)
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


class BatchFollower(JournalFollower[BatchSnapshot]):
    """Reads the new lines of a batch search's journal."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, BatchSnapshot, BatchLine)


def read_batch_journal(directory: Path) -> list[BatchLine]:
    """Read every readable line, oldest first, without a half-written last one."""
    return read_journal(directory, BatchLine)


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
        "measured_under": question.measured_under,
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

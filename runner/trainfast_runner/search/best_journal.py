"""The journal of a best-fit search: its question, trials, runs and answer. Sizes are bytes.

Candidates are numbered from 0 in the order of the `Space` line. Fields with the words of a `Literal` are strings,
because a journal of another version may have other words.
"""

from __future__ import annotations

import math
import re
import statistics
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal

import msgspec

from trainfast_runner.errors import UserError, highest
from trainfast_runner.records.json_lines import newest
from trainfast_runner.records.result import Doubt
from trainfast_runner.records.run_file import PredictedSpeed
from trainfast_runner.search.journal import JournalLines, Line, SearchEnded, SearchQuestion, SharedLine
from trainfast_runner.settings.knob_values import KnobValue, KnobValues, whole_number

SEARCH_OBJECTIVES = ("samples_per_s", "samples_per_joule", "time")
"""Values of --objective; the first is the default."""
BUDGET_S = 600.0
"""Seconds of a search without --budget."""
UNITS_S = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
"""Seconds of each unit of a typed budget."""
BUDGET_EXAMPLES = ("90s", "10m", "1.5h")
"""Budgets as they are typed."""
MAX_BUDGET_H = 365 * 24
"""The largest budget: a year."""


class BestRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request for a best-fit search: knobs to vary, objective, budget.

    Part of the search's key, unlike `SearchOptions`.
    """

    vary: dict[str, list[KnobValue]] = {}
    """The values of each knob to vary; empty to leave the choice to the search."""
    global_batch: int | None = None
    """None for the preset's own, or for any if `vary` names batch_size or grad_accum."""
    objective: str = "samples_per_s"
    """One of SEARCH_OBJECTIVES."""
    for_steps: int | None = None
    """Steps of the training for the objective `time`; None for another objective."""
    budget_s: float = BUDGET_S


def read_budget(text: str) -> float:
    """Return the seconds of a time as typed: 90s, 10m, 1.5h. Raises UserError, also for more than a year."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in UNITS_S or float(match[1]) == 0:
        raise UserError(f"{text!r}: not a time", key="--budget", allowed=BUDGET_EXAMPLES)
    seconds = float(match[1]) * UNITS_S[match[2]]
    if seconds > MAX_BUDGET_H * UNITS_S["h"]:
        raise UserError(f"must be at most {MAX_BUDGET_H}h, a year", key="--budget", allowed=BUDGET_EXAMPLES)
    return seconds


UNNAMED_REASON = "no present value is named"
"""The reason that a script's knob is left alone if neither the preset nor a setting names its value.

A journal keeps it; a screen that finds it there adds how to name the value.
"""
RACE: Final = "race"
"""The role of a cold run that chooses among the leaders."""
CONFIRM: Final = "confirm"
"""The role of a cold run of the winner, or of the baseline beside it."""
TURN_BACK: Final = "turn_back"
"""The role of a cold run of the answer with one knob at the baseline's value."""
UNDER_LIMIT: Final = "limit"
"""The role of a cold run under `memory_limit`, which shows whether a candidate fits."""
ColdRole = Literal["race", "confirm", "turn_back", "limit"]
"""The `role` of a `ColdRun`, and the action that starts the run."""
AttemptOutcome = Literal["measured", "slow", "oom", "failed", "void", "incompatible"]
"""The `outcome` of a trial or a cold run.

slow: a trial that ended early, far below the leader's pace; void: others took the machine, a GPU was throttled, or
the process was lost; incompatible: the script overrode a knob.
"""
TIMED_OUTCOMES: tuple[AttemptOutcome, ...] = ("measured", "slow")
"""Outcomes of trials that have timed steps."""
VerdictWord = Literal["measured", "beaten", "bound", "too_large", "incompatible", "failed", "not_tried"]
"""The `verdict` on a candidate at the end of a search."""


class Interval(msgspec.Struct, frozen=True, kw_only=True):
    """A figure and its 95 % interval."""

    median: float
    low: float
    high: float


class BestQuestion(SearchQuestion, frozen=True, kw_only=True, tag="question"):
    """The question of a best-fit search. The baseline is the recorded spec, with a batch that makes `global_batch`.

    Each process takes the first of `device_uuids`; `limits_bytes` is empty without `memory_limit`. Every
    trial of a script is under these limits, and no trial of a preset.
    """

    vary: dict[str, list[KnobValue]]
    """The values of each varied knob."""
    left_alone: dict[str, str] = {}
    """Knobs, and values as `name=value`, that are not varied, each with the reason."""
    is_default_vary: bool = False
    """True if the request named no knob to vary."""
    global_batch: int | None = None
    """Samples of one optimizer step; None if free."""
    objective: str = "samples_per_s"
    """samples_per_s, samples_per_joule or time (a cold start and `for_steps` steps)."""
    for_steps: int | None = None
    budget_s: float = 600.0
    device_names: list[str] = []

    def objective_at(self, candidate: Candidate, rate: float, start_s: float) -> float:
        """Return the seconds of a start and `for_steps` optimizer steps for the objective `time`, else the rate itself.

        `rate` is in samples/s, or in samples/J if that is the objective; `start_s` is the time to the first timed step.
        """
        if self.objective == "time":
            return start_s + (self.for_steps or 1) * candidate.samples_per_step / rate
        return rate

    def log_objective(self, candidate: Candidate, rate: float, start_s: float) -> float:
        """Return the ln of the objective at a rate, negated for `time`: higher is better."""
        value = math.log(self.objective_at(candidate, rate, start_s))
        return -value if self.objective == "time" else value


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """One combination of knobs, and its known figures before a run."""

    knobs: KnobValues
    """Every varied and derived knob."""
    process_knobs: KnobValues = msgspec.field(default_factory=dict, name="process")
    """The knobs of `knobs` that need a new process."""
    predicted_bytes: int | None = None
    excess_bytes: int | None = None
    least_s_per_sample: float | None = None
    """Bound by FLOPs and the calibrated peak."""
    host_s: float | None = None
    """Calibrated seconds of the traced calls in forward and backward; None if the model was not traced."""
    device_s: float | None = None
    """Calibrated seconds of the traced FLOPs and bytes in forward and backward."""
    optimizer_s: float | None = None
    """Calibrated seconds of the optimizer's traced step."""
    world_size: int = 1
    samples_per_step: int = 1
    """The global batch."""
    excluded_as: str | None = msgspec.field(default=None, name="ruled_out")
    """Verdict on a candidate that is never tried: incompatible or too_large; None for the others."""
    reason: str = ""

    @property
    def batch_size(self) -> int:
        """The candidate's batch_size; 1 if the search does not set it."""
        return whole_number(self.knobs, "batch_size") if "batch_size" in self.knobs else 1


class Space(Line, frozen=True, kw_only=True, tag="space", eq=False):
    """Every candidate, the baseline among them; `dropped` combinations have another global batch.

    A later line has the same candidates with more of them predicted, or more candidates; the last one counts.
    """

    candidates: list[Candidate]
    baseline_number: int = msgspec.field(name="baseline")
    dropped: int = 0
    around: list[int] = []
    """Candidates from which the others differ by one knob, the baseline first; empty for a space of all combinations.

    Batch, accumulation and levers that save memory are not counted."""
    attention_share: float | None = None
    """The share of the model's FLOPs that attention to other tokens takes; None if unknown."""


class ProcessReady(Line, frozen=True, kw_only=True, tag="visited"):
    """A warm process was started for candidates of the same `process_knobs`; it was ready after `start_s` seconds.

    The trials of one process share an offset, which the next process does not have.
    """

    run_id: str
    process_knobs: KnobValues = msgspec.field(name="process")
    start_s: float


class Attempt(Line, frozen=True, kw_only=True):
    """A measurement of one candidate."""

    candidate_number: int = msgspec.field(name="candidate")
    run_id: str
    outcome: str
    """An `AttemptOutcome`."""
    peak_allocated_bytes: int | None = None
    losses: list[float | None] = []
    """Losses of a trial's timed steps, or the first and the last of a cold run; None where not finite.

    Every trial begins with the same weights and keeps its learning rate, so losses compare step by step.
    """
    seconds: float
    reason: str = ""
    doubts: list[Doubt] = []
    """The conditions that make the figures doubtful."""

    @property
    def counts_disturbed(self) -> bool:
        """True if the measurement counts although other processes or heat disturbed it; `reason` names them."""
        return self.outcome == "measured" and bool(self.reason)


class StepProfile(msgspec.Struct, frozen=True, kw_only=True):
    """The phases of a trial's timed steps, in mean ms a step, and the share of the time in which its GPUs were busy."""

    data_ms: float | None = None
    optimizer_ms: float | None = None
    gpu_busy: float | None = None


class Trial(Attempt, frozen=True, kw_only=True, tag="trial"):
    """Some steps of one candidate: in a warm process, or for a script in a run of its own."""

    warm: bool
    """False for the first trial of a process."""
    samples_per_step: int
    step_ms: list[float] = []
    """The timed steps."""
    joules: float | None = None
    profile: StepProfile | None = None
    diagnosis: list[str] = []
    """The bottlenecks of the baseline, in sentences."""
    repeats: bool = False
    """True for the last trial of a process, which repeats its first to show drift."""

    @property
    def is_timed(self) -> bool:
        """True for a trial that was measured or given up as slow, and has the times of its steps."""
        return self.outcome in TIMED_OUTCOMES and bool(self.step_ms) and min(self.step_ms) > 0

    @property
    def median_ms(self) -> float:
        """The median timed step of a timed trial."""
        return statistics.median(self.step_ms)

    @property
    def untimed_s(self) -> float:
        """The seconds beside the timed steps."""
        return max(0.0, self.seconds - sum(self.step_ms) / 1000)


class ColdRun(Attempt, frozen=True, kw_only=True, tag="race"):
    """A cold run: a run in a fresh process."""

    role: str
    """A `ColdRole`; turn_back is of `knob`."""
    knob: str | None = None
    samples_per_s: float | None = None
    mad: float | None = None
    samples_per_joule: float | None = None
    predicted: PredictedSpeed | None = None
    """The speed predicted before the launch."""
    start_s: float = 0.0


class BestStep(Line, frozen=True, kw_only=True, tag="chosen"):
    """The next step and its reason."""

    action: str
    """trial, end, or a `ColdRole`."""
    candidate_number: int | None = msgspec.field(default=None, name="candidate")
    knob: str | None = None
    """The knob that a turn_back run turns back; None for another step."""
    why: str
    leader_number: int | None = msgspec.field(default=None, name="leader")
    """The best candidate so far."""
    rate: float | None = None
    """The leader's samples/s, or samples/J where that is the objective; `low` and `high` are the ends of its 95 %
    interval."""
    low: float | None = None
    high: float | None = None
    next_number: int | None = msgspec.field(default=None, name="next")
    """The candidate of the most promising trial; None if no setting is worth one, or the journal is an earlier one."""
    chance: float | None = None
    """The probability that this trial finds 2 % more; None if no setting is worth a trial."""
    price_s: float | None = None
    """The expected seconds of that trial."""
    repeats: bool = False
    """True for a trial that repeats the first of its process."""


class Effect(msgspec.Struct, frozen=True, kw_only=True):
    """Gain of one value of a knob over the baseline's, `before`, in percent of the objective."""

    knob: str
    value: KnobValue
    before: KnobValue
    gain_percent: Interval
    measured: bool = False
    """True if cold runs measured the gain."""


class CandidateVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """The end of one candidate: its `VerdictWord` and the reason."""

    candidate_number: int = msgspec.field(name="candidate")
    verdict: str
    reason: str
    rate: Interval | None = None
    """In samples/s; None for a candidate that was not measured."""
    excess_bytes: int | None = None
    """The bytes beyond the limit by the prediction; None without one."""


class BestAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer. Rates are in samples/s, values in the unit of the objective (seconds for time)."""

    best_number: int = msgspec.field(name="best")
    best_rate: Interval
    baseline_rate: Interval | None = None
    """None for a baseline that does not fit."""
    best_value: Interval | None = None
    baseline_value: Interval | None = None
    gain_percent: Interval | None = None
    """The gain over the baseline by the objective."""
    best_run_ids: list[str]
    baseline_run_ids: list[str]
    within_percent: float | None = None
    """The noise of the machine if it is too large for the claim, else None."""
    tried_in_budget: int | None = None
    """Number of candidates tried when the budget ended; None if nothing was left to try."""
    tied_numbers: list[int] = msgspec.field(default_factory=list, name="ties")
    """The candidates that the runs could not tell from the winner."""
    effects: list[Effect] = []
    verdicts: list[CandidateVerdict] = []
    pareto_numbers: list[int] = msgspec.field(default_factory=list, name="pareto")
    """The measured candidates that no other beats in both speed and memory."""
    changes_training: list[str] = []
    """Knobs of the winner that change the training itself."""
    diagnosis: list[str] = []
    """The bottlenecks of the baseline, in sentences."""
    unused_lever: str = ""
    """The lever left alone that would matter most, predicted; empty without one."""
    notes: list[str] = []
    """Sentences on the limits of the claim."""


class BestEnded(SearchEnded, frozen=True, kw_only=True, tag="best-ended"):
    """The end of a best-fit search; after `cancelled` its `answer` is the best so far."""

    stopped_because: str = ""
    answer: BestAnswer | None = msgspec.field(default=None, name="found")
    missing_bytes: int | None = None


BestLine = BestQuestion | Space | ProcessReady | Trial | ColdRun | BestStep | BestEnded | SharedLine
"""A line of a best-fit search's journal."""


@dataclass(frozen=True)
class BestJournal(JournalLines[BestQuestion, BestStep, BestEnded]):
    """The lines of a best-fit search's journal, oldest first, by kind."""

    LINE_TYPE = BestLine
    KINDS = BestQuestion, BestStep, BestEnded
    lines: tuple[BestLine, ...] = ()

    @cached_property
    def space(self) -> Space | None:
        """The candidates; None before they are listed."""
        return newest(self.lines, Space)

    @cached_property
    def diagnosis(self) -> list[str]:
        """The bottlenecks of the baseline's first trial that has any, in sentences."""
        number = None if self.space is None else self.space.baseline_number
        return next((line.diagnosis for line in self.trials if line.candidate_number == number and line.diagnosis), [])

    @cached_property
    def attempts(self) -> tuple[Trial | ColdRun, ...]:
        """Every trial and every cold run, void ones included, in their order."""
        return tuple(line for line in self.lines if isinstance(line, Attempt))

    @cached_property
    def trials(self) -> tuple[Trial, ...]:
        """Every trial, void ones and those of voided processes included, in their order."""
        return self.all_of(Trial)

    @cached_property
    def cold_runs(self) -> tuple[ColdRun, ...]:
        """Every cold run, in their order."""
        return self.all_of(ColdRun)

    @property
    def candidates(self) -> list[Candidate]:
        """All candidates, by number; empty before they are listed."""
        return [] if self.space is None else self.space.candidates

    def candidate(self, number: int) -> Candidate:
        """Return a candidate; one without knobs for a number that a damaged journal does not list."""
        return self.candidates[number] if 0 <= number < len(self.candidates) else Candidate(knobs={})

    def peak_bytes(self, number: int) -> int | None:
        """Return the highest measured peak of a candidate; None if none was measured."""
        return highest(line.peak_allocated_bytes for line in self.attempts if line.candidate_number == number)

    def memory_bytes(self, number: int) -> int | None:
        """Return the highest measured peak of a candidate, else its prediction; None without either."""
        return self.peak_bytes(number) or self.candidate(number).predicted_bytes

    @property
    def answer(self) -> BestAnswer | None:
        """The answer, or the best so far of a cancelled search; None before either."""
        return None if self.ended is None else self.ended.answer

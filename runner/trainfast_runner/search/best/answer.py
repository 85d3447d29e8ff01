"""The answer of a best-fit search, as its last journal line, as `search best --json` prints it, and for a screen."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from trainfast_runner.records.json_lines import newest
from trainfast_runner.records.result import Doubt
from trainfast_runner.results.distributions import NORMAL_95, pareto_front, spread
from trainfast_runner.search.best.candidates import objective_interval
from trainfast_runner.search.best.decide import LIKELY_CHANCE, ColdRuns, Difference, Prospects
from trainfast_runner.search.best.person_instructions import read_instructions
from trainfast_runner.search.best.state import WORTHWHILE_LOG_GAIN, WORTHWHILE_PERCENT, BestState, state_of_best_journal
from trainfast_runner.search.best_journal import (
    TIMED_OUTCOMES,
    UNDER_LIMIT,
    Attempt,
    BestAnswer,
    BestEnded,
    BestJournal,
    BestLine,
    BestStep,
    CandidateVerdict,
    ColdRun,
    Effect,
    Instruction,
    Interval,
    Space,
    Trial,
    VerdictWord,
    read_best_journal,
)
from trainfast_runner.search.effects import DRIFT_LOG_RATE, ProcessStarts, log_rate, measurements
from trainfast_runner.search.journal import JournalFollower, Waiting, fields_of, first_fields, worked_seconds
from trainfast_runner.search.searches import knobs_key
from trainfast_runner.units import chance_text, counted

NOTED_LOG_GAP = 0.03
"""Chosen, not measured: a difference between trials and cold runs that the answer mentions, in ln of the objective."""
CHOSEN_REASON = "chosen: no setting is faster beyond the noise of this machine"
"""The verdict on an answer that is not clearly the fastest."""
SCRIPT_MEMORY = "the memory of a script is measured by its trials"
"""The reason that `predicted_bytes` is None for a script."""


def answer_of(state: BestState) -> BestAnswer | None:
    """Return the answer, or the best so far of a running search; None before anything was measured."""
    if state.leader_number is None:
        return None
    cold = ColdRuns(state)
    best_number, baseline_number = cold.answer_number, cold.baseline_number
    numbers = range(len(state.candidates))
    log_rates = {number: rate for number in numbers if (rate := _log_rate(cold, number)) is not None}
    rates = {number: _interval(*rate) for number, rate in log_rates.items()}
    gain = None
    if best_number == baseline_number:
        gain = Difference(0.0, 0.0)
    elif baseline_number in rates and baseline_number not in state.ruled_out:
        gain = cold.difference(best_number, baseline_number)
    half_width = cold.half_width(cold.figures)
    # The gain may be zero, or a rival the best.
    is_open = bool(cold.ties) or (best_number != baseline_number and gain is not None and not gain.is_clear)
    is_noisy = half_width >= WORTHWHILE_LOG_GAIN and is_open
    prospects = Prospects(state, cold)
    verdicts = [_verdict(cold, prospects, number, rates.get(number)) for number in numbers]
    if is_noisy:
        verdicts[best_number] = msgspec.structs.replace(verdicts[best_number], reason=CHOSEN_REASON)
    # The memory and the rate of the measured candidates.
    points = {
        number: (needed_bytes, rate)
        for number, (rate, _) in log_rates.items()
        if number not in state.ruled_out and (needed_bytes := state.journal.memory_bytes(number)) is not None
    }
    tried_numbers = {run.candidate_number for run in state.journal.attempts if run.outcome != "void"}
    return BestAnswer(
        best_number=best_number,
        best_rate=rates[best_number],
        baseline_rate=rates.get(baseline_number),
        best_value=_value(cold, best_number),
        baseline_value=_value(cold, baseline_number),
        gain_percent=None if gain is None else _percent(gain),
        best_run_ids=_run_ids(cold, best_number),
        baseline_run_ids=_run_ids(cold, baseline_number),
        within_percent=100 * math.expm1(half_width) if is_noisy else None,
        tried_in_budget=len(tried_numbers) if prospects.is_budget_spent else None,
        tied_numbers=cold.ties,
        effects=list(_effects(cold)),
        verdicts=verdicts,
        pareto_numbers=[[*points][index] for index in pareto_front([*points.values()])],
        changes_training=state.changes_training(best_number),
        notes=list(_notes(cold)),
    )


def _verdict(cold: ColdRuns, prospects: Prospects, number: int, rate: Interval | None) -> CandidateVerdict:
    state = cold.state
    if number in state.ruled_out:
        return state.ruled_out[number]
    verdict, reason = ("measured", _against_best(cold, number)) if rate else _unmeasured(state, prospects, number)
    return CandidateVerdict(candidate_number=number, verdict=verdict, reason=reason, rate=rate)


def _unmeasured(state: BestState, prospects: Prospects, number: int) -> tuple[VerdictWord, str]:
    if number in state.excluded_by_instructions:
        return "not_tried", state.excluded_by_instructions[number]
    least_s = state.candidates[number].least_s_per_sample
    if least_s and number in state.bound_numbers:
        return "bound", f"at most {1 / least_s:.4g} samples/s by its FLOPs and the device's peak"
    chance = float(prospects.chances[number])
    text = f"{chance_text(chance, decimals=1)} chance of being {WORTHWHILE_PERCENT} % better than the best"
    return ("beaten", text) if chance <= LIKELY_CHANCE else ("not_tried", f"no time left: {text}")


def _against_best(cold: ColdRuns, number: int) -> str:
    """Return a measured candidate's difference from the best, in words."""
    if number == cold.answer_number:
        return "the best"
    difference = cold.difference(number, cold.answer_number)
    text = f"{100 * math.expm1(difference.mean):+.1f} %"
    if not difference.is_clear:
        return f"{text}, within the noise of the best"
    return f"{text} by its trial, not confirmed" if difference.mean > 0 else f"{text} against the best"


def _percent(difference: Difference) -> Interval:
    low, median, high = (100 * math.expm1(difference.mean + shift * difference.half_width) for shift in (-1, 0, 1))
    return Interval(median=median, low=low, high=high)


def _interval(middle: float, half_width: float) -> Interval:
    return Interval(median=math.exp(middle), low=math.exp(middle - half_width), high=math.exp(middle + half_width))


def _log_rate(cold: ColdRuns, number: int) -> tuple[float, float] | None:
    """Return the ln samples/s of a candidate and half of its interval: by cold runs, else by trials; else None."""
    state, rates = cold.state, cold.log_rates.get(number)
    if rates:
        return statistics.fmean(rates), cold.half_width(cold.log_rates, len(rates))
    trials = state.counted_trials.get(number)
    if not trials:
        return None
    if state.question.objective == "samples_per_joule":  # the model is of joules
        variance = statistics.fmean(map(state.measured.variance, trials)) / len(trials)
        middle = statistics.fmean(log_rate(trial) or 0.0 for trial in trials)
        return middle, NORMAL_95 * math.sqrt(variance + state.posterior.scales.process**2)
    return float(state.posterior.mean[number]), NORMAL_95 * math.sqrt(state.posterior.variance[number])


def _value(cold: ColdRuns, number: int) -> Interval | None:
    """Return the objective of a candidate in its unit (seconds for `time`); None if it was not measured."""
    state, figures = cold.state, cold.figures.get(number)
    if figures:
        middle, half_width = statistics.fmean(figures), cold.half_width(cold.figures, len(figures))
    elif number in state.counted_trials:
        values, slopes = state.log_objectives
        middle = float(values[number])
        half_width = NORMAL_95 * float(slopes[number]) * math.sqrt(state.posterior.variance[number])
    else:
        return None
    return _interval(-middle if state.question.objective == "time" else middle, half_width)


def _run_ids(cold: ColdRuns, number: int) -> list[str]:
    """Return the ids of the cold runs that measured a candidate's speed."""
    return [
        run.run_id
        for run in cold.counted
        if run.candidate_number == number and run.outcome == "measured" and run.role != UNDER_LIMIT
    ]


def _effects(cold: ColdRuns) -> Iterator[Effect]:
    """Yield the gain of each value that was run over the baseline's, all else as in the answer or the baseline."""
    state, levels = cold.state, cold.state.posterior.levels
    for index, name in enumerate(levels.names):
        base_level = levels.points[cold.baseline_number][index]
        levels_run = {levels.points[number][index] for number in state.counted_trials}
        for level, value in enumerate(levels.values[name]):
            pair = None if level == base_level else _pair_with_levels(cold, name, level, base_level)
            if pair is None:
                continue
            by_runs = cold.difference_in(cold.figures, *pair)
            if by_runs is None and not {level, base_level} <= levels_run:
                continue
            yield Effect(
                knob=name,
                value=value,
                before=levels.values[name][base_level],
                gain_percent=_percent(by_runs or cold.by_trials(*pair)),
                measured=by_runs is not None,
            )


def _pair_with_levels(cold: ColdRuns, name: str, level: int, base_level: int) -> tuple[int, int] | None:
    """Return the best candidate with the two levels of a knob, else the baseline with them; None if neither exists."""
    levels = cold.state.posterior.levels
    for number in (cold.answer_number, cold.baseline_number):
        with_value, with_base = (levels.with_level(number, name, other) for other in (level, base_level))
        if with_value is not None and with_base is not None:
            return with_value, with_base
    return None


def _notes(cold: ColdRuns) -> Iterator[str]:
    """Yield sentences on the limits of the claim."""
    state, baseline_number = cold.state, cold.baseline_number
    if baseline_number in state.ruled_out:
        problem = "does not fit" if baseline_number in state.counted_trials else "has no figure"
        yield f"the baseline {problem}: {state.ruled_out[baseline_number].reason}"
    for number, name in ((cold.answer_number, "best"), (baseline_number, "baseline")):
        figures, is_both = cold.figures.get(number), name == "baseline" and number == cold.answer_number
        if figures and number in state.counted_trials and not is_both:
            gap = statistics.fmean(figures) - float(state.log_objectives[0][number])
            if abs(gap) > NOTED_LOG_GAP:
                yield f"the {name} is {100 * math.expm1(gap):+.1f} % in fresh processes against its trial"
    if state.measured.drifts:
        drifted = counted(len(state.measured.drifts), "process", "processes")
        percent = f"{100 * DRIFT_LOG_RATE:.0f} %"
        yield f"{drifted} drifted by more than {percent}: their settings' intervals include the drift"


def verdicts_without_answer(lines: Sequence[BestLine]) -> list[CandidateVerdict]:
    """Return one verdict for every candidate, in their order, of a search that ended without an answer.

    Empty before the end; a cancelled search has not ended, because the same command continues it.
    """
    end = newest(lines, BestEnded)
    if end is None or end.state == "cancelled" or not any(isinstance(line, Space) for line in lines):
        return []
    state = state_of_best_journal(lines, end.seconds)
    reasons = [state.excluded_by_instructions.get(number, end.reason) for number in range(len(state.candidates))]
    return [
        state.ruled_out.get(number, CandidateVerdict(candidate_number=number, verdict="not_tried", reason=reason))
        for number, reason in enumerate(reasons)
    ]


def best_report(directory: Path) -> dict[str, Any]:
    """Return the whole search as one object; absent figures are None."""
    lines = read_best_journal(directory)
    so_far, end = BestSoFar(tuple(lines)), newest(lines, BestEnded)
    question, space = so_far.question, so_far.space
    assert question is not None, "a search is reported once it has its question"
    return {
        **first_fields(question, end),
        **fields_of(question, "objective", "for_steps", "global_batch", "vary", "left_alone"),
        **_answer_fields(end, so_far),
        "candidates": len(space.candidates) if space is not None else None,
        "dropped": space.dropped if space is not None else None,
        "unpredicted": SCRIPT_MEMORY if question.is_script else None,
        "trials": [_trial_fields(trial, so_far) for trial in so_far.trials],
        "races": [_cold_run_fields(run, so_far) for run in so_far.cold_runs],
        "disturbed": so_far.disturbed_count,
        "orders": [_instruction_fields(instruction, so_far) for instruction in so_far.instructions],
        **fields_of(end, "missing_bytes", "stopped_because", "seconds"),
    }


def _answer_fields(end: BestEnded | None, so_far: BestSoFar) -> dict[str, Any]:
    """Return the fields of the answer; None and empty lists without one. `winner` is None if the noise is too large."""
    answer, space = end.answer if end is not None else None, so_far.space
    if end is None or answer is None or space is None:
        names = ("winner", "best", "baseline", "gain", "within_percent", "tried_in_budget")
        lists = ("doubts", "ties", "effects", "pareto", "changes_training", "notes")
        verdicts = [_verdict_fields(verdict, so_far) for verdict in verdicts_without_answer(so_far.lines)]
        return {**dict.fromkeys(names), **{name: [] for name in lists}, "verdicts": verdicts}

    def side(number: int, rate: Interval | None, value: Interval | None, run_ids: list[str]) -> dict[str, Any]:
        candidate = so_far.candidate(number)
        return {
            "knobs": candidate.knobs,
            "samples_per_s": rate,
            "value": value,
            "predicted_bytes": candidate.predicted_bytes,
            "run_id": next(iter(run_ids), None),
            "run_ids": run_ids,
            "doubts": so_far.doubts_of(number),
        }

    best = side(answer.best_number, answer.best_rate, answer.best_value, answer.best_run_ids)
    baseline_figures = answer.baseline_rate, answer.baseline_value, answer.baseline_run_ids
    is_decided = end.state == "answered" and answer.within_percent is None
    rates = {verdict.candidate_number: verdict.rate for verdict in answer.verdicts}
    return {
        "winner": best["knobs"] if is_decided else None,
        "best": best,
        "baseline": side(space.baseline_number, *baseline_figures),
        "doubts": so_far.answer_doubts,
        "gain": _gain_fields(answer.gain_percent),
        **fields_of(answer, "within_percent", "tried_in_budget", "changes_training", "notes"),
        "ties": [so_far.candidate(number).knobs for number in answer.tied_numbers],
        "effects": [_effect_fields(effect) for effect in answer.effects],
        "verdicts": [_verdict_fields(verdict, so_far) for verdict in answer.verdicts],
        "pareto": [
            {
                "knobs": so_far.candidate(number).knobs,
                "samples_per_s": rates.get(number),
                "peak_allocated_bytes": so_far.peak_bytes(number),
            }
            for number in answer.pareto_numbers
        ],
    }


def _verdict_fields(verdict: CandidateVerdict, so_far: BestSoFar) -> dict[str, Any]:
    candidate = so_far.candidate(verdict.candidate_number)
    words = fields_of(verdict, "verdict", "reason", "excess_bytes")
    figures = {"samples_per_s": verdict.rate, "predicted_bytes": candidate.predicted_bytes}
    return {"knobs": candidate.knobs, **words, **figures}


def _gain_fields(percent: Interval | None) -> dict[str, float] | None:
    return None if percent is None else {"percent": percent.median, "low": percent.low, "high": percent.high}


def _effect_fields(effect: Effect) -> dict[str, Any]:
    gain = {"from": effect.before, "gain": _gain_fields(effect.gain_percent)}
    return {**fields_of(effect, "knob", "value", "measured"), **gain}


def _instruction_fields(instruction: Instruction, so_far: BestSoFar) -> dict[str, Any]:
    """Return an instruction; `knobs` are those of a skipped candidate, else None."""
    number = instruction.candidate_number
    knobs = None if number is None else so_far.candidate(number).knobs
    return {"do": instruction.do, "knob": instruction.knob or None, "value": instruction.value, "knobs": knobs}


LINE_FIELDS = ("outcome", "reason", "missing_bytes", "doubts", "seconds", "peak_allocated_bytes", "run_id")
"""The fields that the report has of trials and of cold runs."""


def _trial_fields(line: Trial, so_far: BestSoFar) -> dict[str, Any]:
    """Return a trial with its samples/s: median and median absolute deviation over steps; None without a timed step."""
    rates = spread([1000 * line.samples_per_step / ms for ms in line.step_ms if ms > 0])
    return {
        "knobs": so_far.candidate(line.candidate_number).knobs,
        "samples_per_s": None if rates.median is None else {"median": rates.median, "mad": rates.mad},
        "steps": len(line.step_ms),
        **fields_of(line, "warm", "repeats", *LINE_FIELDS),
    }


def _cold_run_fields(line: ColdRun, so_far: BestSoFar) -> dict[str, Any]:
    return {
        "knobs": so_far.candidate(line.candidate_number).knobs,
        "samples_per_s": None if line.samples_per_s is None else {"median": line.samples_per_s, "mad": line.mad},
        **fields_of(line, "predicted", "role", "knob", "samples_per_joule", "start_s", *LINE_FIELDS),
    }


class Leader(NamedTuple):
    """The number of the best candidate so far, its objective, and its rate in samples/s."""

    number: int
    value: Interval
    rate: Interval


@dataclass(frozen=True)
class BestSoFar(BestJournal):
    """A journal's lines with the figures derived for a screen."""

    @property
    def disturbed_count(self) -> int:
        """The number of measurements that count although other processes or heat disturbed them."""
        return sum(line.counts_disturbed for line in self.attempts)

    @cached_property
    def is_under_way(self) -> bool:
        """True while the newest step has no outcome yet."""
        last_line = next((line for line in reversed(self.lines) if isinstance(line, BestStep | Attempt)), None)
        return isinstance(last_line, BestStep) and last_line.candidate_number is not None

    @cached_property
    def rates(self) -> Mapping[int, Interval]:
        """Samples/s of each trial and run by its index in `attempts`; samples/J if that is the objective.

        The 95 % interval of a trial is by its own and the pooled steps; a cold run has none of its own.
        """
        measured = measurements(self.lines)
        per_joule = self.objective == "samples_per_joule"
        rates = {}
        for index, line in enumerate(self.attempts):
            if isinstance(line, ColdRun):
                rate = line.samples_per_joule if per_joule else line.samples_per_s
                # The real memory_limit slows every step.
                if rate is not None and line.role != UNDER_LIMIT:
                    rates[index] = Interval(median=rate, low=rate, high=rate)
            elif line.step_ms and min(line.step_ms) > 0 and (middle := log_rate(line, per_joule=per_joule)) is not None:
                half = NORMAL_95 * math.sqrt(measured.variance(line))
                low, median, high = (math.exp(middle + shift) for shift in (-half, 0.0, half))
                rates[index] = Interval(median=median, low=low, high=high)
        return rates

    @cached_property
    def values(self) -> Mapping[int, Interval]:
        """The objective in its unit (seconds for time) of each trial and run by its index in `attempts`."""
        values = {}
        for index, rate in self.rates.items():
            line = self.attempts[index]
            start_s = line.start_s if isinstance(line, ColdRun) else None
            values[index] = self.value_of(line.candidate_number, rate, start_s)
        return values

    def value_of(self, number: int, rate: Interval, start_s: float | None = None) -> Interval:
        """Return the objective of a candidate at a rate; without `start_s` its process start is the expected one."""
        candidate = self.candidate(number)
        if start_s is None:
            start_s = self._starts.seconds(knobs_key(candidate.process_knobs))
        return rate if self.question is None else objective_interval(self.question, candidate, rate, start_s)

    @cached_property
    def objective(self) -> str:
        """The objective's name; that of the default before the question is written."""
        return "samples_per_s" if self.question is None else self.question.objective

    @property
    def for_steps(self) -> int | None:
        """Steps of the training for the objective `time`; None for another objective."""
        return None if self.question is None else self.question.for_steps

    @cached_property
    def best(self) -> Leader | None:
        """The answer's candidate, else the leader of the newest step that names one; None before any was measured."""
        if self.answer is not None:
            return Leader(
                self.answer.best_number, self.answer.best_value or self.answer.best_rate, self.answer.best_rate
            )
        for step in reversed(self.lines):
            if isinstance(step, BestStep) and step.leader_number is not None and step.rate is not None:
                rate = Interval(median=step.rate, low=step.low or step.rate, high=step.high or step.rate)
                return Leader(step.leader_number, self.value_of(step.leader_number, rate), rate)
        return None

    def doubts_of(self, number: int) -> list[Doubt]:
        """Return the doubts about the figures of a candidate, each kind once: of its cold runs, else of its trials."""
        counted = [line for line in self.attempts if line.candidate_number == number and line.outcome in TIMED_OUTCOMES]
        cold_runs = [line for line in counted if isinstance(line, ColdRun) and line.role != UNDER_LIMIT]
        return [*{doubt.kind: doubt for line in cold_runs or counted for doubt in line.doubts}.values()]

    @property
    def answer_doubts(self) -> list[Doubt]:
        """The doubts about the best setting and about the baseline, with the setting named; empty without an answer."""
        if self.answer is None or self.space is None:
            return []
        sides = {self.answer.best_number: "the best setting", self.space.baseline_number: "the baseline"}
        return [
            Doubt(kind=doubt.kind, text=f"{side}: {doubt.text}")
            for number, side in sides.items()
            for doubt in self.doubts_of(number)
        ]

    @cached_property
    def _starts(self) -> ProcessStarts:
        return ProcessStarts(self.lines)

    @cached_property
    def limit_bytes(self) -> int | None:
        """Bytes that a rank may take: `memory_limit`, else the limit that candidates exceed; None if unknown."""
        if self.question is not None and self.question.limits_bytes:
            return min(self.question.limits_bytes)
        limits_bytes = (
            candidate.predicted_bytes - candidate.excess_bytes
            for candidate in self.candidates
            if candidate.predicted_bytes is not None and candidate.excess_bytes is not None
        )
        return next(limits_bytes, None)

    def spent_s(self, now_ns: int | None = None) -> float:
        """Seconds that conductors worked on the search, until the last line or until `now_ns` (CLOCK_MONOTONIC)."""
        if self.ended is not None:
            return self.ended.seconds
        last_line = self.lines[-1] if self.lines else None
        is_working = last_line is not None and not self.is_paused and not isinstance(last_line, Waiting)
        since_last = now_ns - last_line.t_ns if now_ns is not None and last_line is not None and is_working else 0
        return worked_seconds(self.lines) + max(0, since_last) / 1e9


@dataclass(frozen=True)
class BestSnapshot:
    """The state of a best-fit search at one moment."""

    so_far: BestSoFar
    untaken_instructions: tuple[Instruction, ...] = ()
    """The instructions that the conductor has not taken yet."""

    @property
    def directory(self) -> Path:
        """The search's directory."""
        return self.so_far.directory

    @property
    def state(self) -> str:
        """The state of the search, as of its journal."""
        return self.so_far.state

    @property
    def is_live(self) -> bool:
        """True if a conductor works on the search."""
        return self.so_far.is_live


class BestFollower:
    """Reads new journal lines at each `poll`. Not safe to share between threads."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._journal = JournalFollower(directory, BestSoFar, BestLine)

    def poll(self) -> BestSnapshot:
        """Read the new lines and return a snapshot."""
        so_far = self._journal.poll()
        untaken_instructions: list[Instruction] = []
        with suppress(OSError):  # unreadable for the moment
            untaken_instructions = read_instructions(self.directory)[len(so_far.instructions) :]
        return BestSnapshot(so_far, tuple(untaken_instructions))

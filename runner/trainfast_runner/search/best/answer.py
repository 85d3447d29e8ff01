"""The answer of a best-fit search, as its last journal line, as `search best --json` prints it, and for a screen."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from trainfast_runner.records.result import Doubt
from trainfast_runner.results.distributions import NORMAL_95, pareto_front, spread
from trainfast_runner.search.best import decide
from trainfast_runner.search.best.levers import unused_lever
from trainfast_runner.search.best.question import MEMORY_LEVERS, changes_training
from trainfast_runner.search.best_journal import (
    TIMED_OUTCOMES,
    UNDER_LIMIT,
    Attempt,
    BestAnswer,
    BestJournal,
    BestStep,
    CandidateVerdict,
    ColdRun,
    Effect,
    Interval,
    Trial,
    VerdictWord,
)
from trainfast_runner.search.effects import DRIFT_LOG_RATE, Measurements, ProcessStarts, log_rate
from trainfast_runner.search.journal import Waiting, fields_of, first_fields, worked_seconds
from trainfast_runner.search.searches import BATCH_KNOBS, knobs_key
from trainfast_runner.units import chance_text, counted

NOTED_LOG_GAP = 0.03
"""Chosen, not measured: a difference between trials and cold runs that the answer mentions, in ln of the objective."""
CHOSEN_REASON = "chosen: no setting is faster beyond the noise of this machine"
"""The verdict on an answer that is not clearly the fastest."""


def answer_of(state: decide.BestState) -> BestAnswer | None:
    """Return the answer, or the best so far of a running search; None before anything was measured."""
    if state.leader_number is None:
        return None
    cold = state.cold
    best_number, baseline_number = cold.answer_number, cold.baseline_number
    log_rates = _log_rates(state)
    rates = {number: _interval(*log_rate) for number, log_rate in log_rates.items()}
    gain = None
    if best_number == baseline_number:
        gain = decide.Difference(0.0, 0.0)
    elif baseline_number in rates and baseline_number not in state.ruled_out:
        gain = cold.difference(best_number, baseline_number)
    half_width = cold.half_width(cold.figures)
    # The gain may be zero, or a rival the best.
    is_open = bool(cold.ties) or (best_number != baseline_number and gain is not None and not gain.is_clear)
    is_noisy = half_width >= decide.WORTHWHILE_LOG_GAIN and is_open
    verdicts = [_verdict(state, number, rates.get(number)) for number in range(len(state.candidates))]
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
        best_value=_value(state, best_number),
        baseline_value=_value(state, baseline_number),
        gain_percent=None if gain is None else _percent(gain),
        best_run_ids=[run.run_id for run in cold.measured if run.candidate_number == best_number],
        baseline_run_ids=[run.run_id for run in cold.measured if run.candidate_number == baseline_number],
        within_percent=100 * math.expm1(half_width) if is_noisy else None,
        tried_in_budget=len(tried_numbers) if state.is_budget_spent else None,
        tied_numbers=cold.ties,
        effects=list(_effects(cold)),
        verdicts=verdicts,
        pareto_numbers=[[*points][index] for index in pareto_front([*points.values()])],
        changes_training=changes_training(state.candidates[best_number], state.candidates[baseline_number]),
        diagnosis=state.journal.diagnosis,
        unused_lever=unused_lever(
            state.question, state.candidates[best_number], state.counted_trials.get(best_number, ())
        ),
        notes=list(_notes(cold)),
    )


def _verdict(state: decide.BestState, number: int, rate: Interval | None) -> CandidateVerdict:
    """Return the verdict on a candidate, with its `rate` if it was measured."""
    if number in state.ruled_out:
        return state.ruled_out[number]
    chance = float(state.chances[number])
    verdict: VerdictWord = "not_tried"
    if rate is not None:
        verdict, reason = "measured", _against_best(state.cold, number)
    elif number in state.bounds:
        verdict, reason = "bound", state.bounds[number]
    else:
        reason = f"{chance_text(chance, decimals=1)} chance of being {decide.WORTHWHILE_PERCENT} % better than the best"
        if chance <= decide.LIKELY_CHANCE:
            verdict = "beaten"
        else:
            reason = f"no time left: {reason}"
    return CandidateVerdict(candidate_number=number, verdict=verdict, reason=reason, rate=rate)


def _against_best(cold: decide.ColdRuns, number: int) -> str:
    """Return a measured candidate's difference from the best, in words."""
    if number == cold.answer_number:
        return "the best"
    difference = cold.difference(number, cold.answer_number)
    text = f"{100 * math.expm1(difference.mean):+.1f} %"
    if not difference.is_clear:
        return f"{text}, within the noise of the best"
    return f"{text} by its trial, not confirmed" if difference.mean > 0 else f"{text} against the best"


def _percent(difference: decide.Difference) -> Interval:
    low, median, high = (100 * math.expm1(difference.mean + shift * difference.half_width) for shift in (-1, 0, 1))
    return Interval(median=median, low=low, high=high)


def _interval(middle: float, half_width: float) -> Interval:
    return Interval(median=math.exp(middle), low=math.exp(middle - half_width), high=math.exp(middle + half_width))


def _log_rates(state: decide.BestState) -> dict[int, tuple[float, float]]:
    """Return the ln samples/s of each measured candidate and half of its interval: by cold runs, else by trials."""
    by_runs: dict[int, list[float]] = {}
    for run in state.cold.measured:
        if run.samples_per_s:
            by_runs.setdefault(run.candidate_number, []).append(math.log(run.samples_per_s))
    if state.question.objective == "samples_per_joule":  # the model is of joules
        by_trials = {number: [log_rate(trial) or 0.0 for trial in of] for number, of in state.counted_trials.items()}
        by_runs = by_trials | by_runs
    means, deviations = state.posterior.mean, np.sqrt(state.posterior.variance)
    by_model = {
        number: (float(means[number]), NORMAL_95 * float(deviations[number])) for number in state.counted_trials
    }
    return by_model | {
        number: (statistics.fmean(rates), state.cold.half_width(by_runs, len(rates)))
        for number, rates in by_runs.items()
    }


def _value(state: decide.BestState, number: int) -> Interval | None:
    """Return the objective of a candidate in its unit (seconds for `time`); None if it was not measured."""
    cold, figures = state.cold, state.cold.figures.get(number)
    if figures:
        middle, half_width = statistics.fmean(figures), cold.half_width(cold.figures, len(figures))
    elif number in state.counted_trials:
        values, slopes = state.log_objectives
        middle = float(values[number])
        half_width = NORMAL_95 * float(slopes[number]) * math.sqrt(state.posterior.variance[number])
    else:
        return None
    return _interval(-middle if state.question.objective == "time" else middle, half_width)


def _effects(cold: decide.ColdRuns) -> Iterator[Effect]:
    """Yield the gain of each value that was run over the baseline's, all else as in the answer or the baseline."""
    state, levels = cold.state, cold.state.levels
    for index, name in enumerate(levels.names):
        base_level = levels.points[cold.baseline_number][index]
        levels_run = {levels.points[number][index] for number in state.counted_trials}
        for level, value in enumerate(levels.values[name]):
            pair = None if level == base_level else _pair_with_levels(cold, name, level, base_level)
            if pair is None:
                continue
            by_runs = cold.by_runs(*pair)
            if by_runs is None and not {level, base_level} <= levels_run:
                continue
            yield Effect(
                knob=name,
                value=value,
                before=levels.values[name][base_level],
                gain_percent=_percent(by_runs or cold.by_trials(*pair)),
                measured=by_runs is not None,
            )


def _pair_with_levels(cold: decide.ColdRuns, name: str, level: int, base_level: int) -> tuple[int, int] | None:
    """Return the best candidate with the two levels of a knob, else the baseline with them; None if neither exists."""
    levels = cold.state.levels
    for number in (cold.answer_number, cold.baseline_number):
        with_value, with_base = (levels.with_level(number, name, other) for other in (level, base_level))
        if with_value is not None and with_base is not None:
            return with_value, with_base
    return None


def _notes(cold: decide.ColdRuns) -> Iterator[str]:
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
    if state.space.around:
        count = math.prod(map(len, state.question.vary.values())) - state.space.dropped
        alone = [name for name in state.question.vary if name not in (*BATCH_KNOBS, *MEMORY_LEVERS)]
        yield (
            f"{len(state.candidates):,} of {count:,} combinations were candidates:"
            f" two of {', '.join(alone)} are changed together only where one of them led alone"
        )
    if state.measured.drifts:
        drifted = counted(len(state.measured.drifts), "process", "processes")
        percent = f"{100 * DRIFT_LOG_RATE:.0f} %"
        yield f"{drifted} drifted by more than {percent}: their trials were repeated, or count with the drift as noise"


LINE_FIELDS = ("outcome", "reason", "doubts", "seconds", "peak_allocated_bytes", "run_id")
"""The fields that the report has of trials and of cold runs."""


def best_report(directory: Path) -> dict[str, Any]:
    """Return the whole search as one object; absent figures are None."""
    so_far = BestSoFar.read(directory)
    question, space, end, fields = so_far.question, so_far.space, so_far.ended, so_far.fields_with_knobs
    assert question is not None, "a search is reported once it has its question"
    trials = [
        {**fields(trial, "warm", "repeats", *LINE_FIELDS), "samples_per_s": _spread(trial), "steps": len(trial.step_ms)}
        for trial in so_far.trials
    ]
    cold_runs = [
        {
            **fields(run, "predicted", "role", "knob", "samples_per_joule", "start_s", *LINE_FIELDS),
            "samples_per_s": None if run.samples_per_s is None else {"median": run.samples_per_s, "mad": run.mad},
        }
        for run in so_far.cold_runs
    ]
    return {
        **first_fields(question, end),
        **fields_of(question, "objective", "for_steps", "global_batch", "vary", "left_alone"),
        **_answer_fields(so_far),
        "candidates": None if space is None else len(space.candidates),
        **fields_of(space, "dropped"),
        "trials": trials,
        "races": cold_runs,
        **fields_of(end, "missing_bytes", "stopped_because", "seconds"),
    }


def _spread(trial: Trial) -> dict[str, float | None] | None:
    """Return samples/s of a trial: median and median absolute deviation over steps; None without a timed step."""
    rates = spread([1000 * trial.samples_per_step / ms for ms in trial.step_ms if ms > 0])
    return None if rates.median is None else {"median": rates.median, "mad": rates.mad}


def _answer_fields(so_far: BestSoFar) -> dict[str, Any]:
    """Return the fields of the answer; None and empty lists without one. `winner` is None if the noise is too large."""
    answer, space, end = so_far.answer, so_far.space, so_far.ended
    verdict_fields = [
        {
            **so_far.fields_with_knobs(verdict, "verdict", "reason", "excess_bytes"),
            "samples_per_s": verdict.rate,
            "predicted_bytes": so_far.candidate(verdict.candidate_number).predicted_bytes,
        }
        for verdict in so_far.verdicts
    ]
    if end is None or answer is None or space is None:
        names = ("winner", "best", "baseline", "gain", "within_percent", "tried_in_budget", "unused_lever")
        lists = ("doubts", "ties", "effects", "pareto", "changes_training", "diagnosis", "notes")
        return {**dict.fromkeys(names), **{name: [] for name in lists}, "verdicts": verdict_fields}

    def side(number: int, rate: Interval | None, value: Interval | None, run_ids: list[str]) -> dict[str, Any]:
        return {
            **fields_of(so_far.candidate(number), "knobs", "predicted_bytes"),
            "samples_per_s": rate,
            "value": value,
            "run_id": next(iter(run_ids), None),
            "run_ids": run_ids,
            "doubts": so_far.doubts_of(number),
        }

    def gain(percent: Interval | None) -> dict[str, float] | None:
        return None if percent is None else {"percent": percent.median, "low": percent.low, "high": percent.high}

    best = side(answer.best_number, answer.best_rate, answer.best_value, answer.best_run_ids)
    baseline_figures = answer.baseline_rate, answer.baseline_value, answer.baseline_run_ids
    is_decided = end.state == "answered" and answer.within_percent is None
    rates = {verdict.candidate_number: verdict.rate for verdict in answer.verdicts}
    return {
        "winner": best["knobs"] if is_decided else None,
        "best": best,
        "baseline": side(space.baseline_number, *baseline_figures),
        "doubts": so_far.answer_doubts,
        "gain": gain(answer.gain_percent),
        **fields_of(
            answer, "within_percent", "tried_in_budget", "changes_training", "diagnosis", "unused_lever", "notes"
        ),
        "ties": [so_far.candidate(number).knobs for number in answer.tied_numbers],
        "effects": [
            {**fields_of(effect, "knob", "value", "measured"), "from": effect.before, "gain": gain(effect.gain_percent)}
            for effect in answer.effects
        ],
        "verdicts": verdict_fields,
        "pareto": [
            {
                "knobs": so_far.candidate(number).knobs,
                "samples_per_s": rates.get(number),
                "peak_allocated_bytes": so_far.peak_bytes(number),
            }
            for number in answer.pareto_numbers
        ],
    }


class Leader(NamedTuple):
    """The number of the best candidate so far, its objective, and its rate in samples/s."""

    number: int
    value: Interval
    rate: Interval


@dataclass(frozen=True)
class BestSoFar(BestJournal):
    """A best-fit search at one moment: its journal with the figures derived for a screen."""

    @cached_property
    def verdicts(self) -> list[CandidateVerdict]:
        """One verdict for every candidate, in their order; empty before the end, and if a cancelled search has none."""
        if self.ended is None or self.space is None or self.answer is not None:
            return [] if self.answer is None else self.answer.verdicts
        if self.ended.state == "cancelled":
            return []  # the same command continues it
        ruled_out, reason = decide.BestState(self.lines, self.ended.seconds).ruled_out, self.ended.reason
        return [
            ruled_out.get(number, CandidateVerdict(candidate_number=number, verdict="not_tried", reason=reason))
            for number in range(len(self.candidates))
        ]

    def fields_with_knobs(self, line: Attempt | CandidateVerdict, *names: str) -> dict[str, Any]:
        """Return these fields of a line, with the knobs of its candidate."""
        return {"knobs": self.candidate(line.candidate_number).knobs, **fields_of(line, *names)}

    @cached_property
    def is_under_way(self) -> bool:
        """True while the newest step has no outcome yet."""
        last_line = next((line for line in reversed(self.lines) if isinstance(line, BestStep | Attempt)), None)
        return isinstance(last_line, BestStep) and last_line.candidate_number is not None

    @cached_property
    def rates(self) -> Mapping[int, Interval]:
        """Samples/s of each trial and run by its index in `attempts`; samples/J if that is the objective.

        The 95 % interval of a trial is by the pooled steps; a cold run has none of its own.
        """
        measured, per_joule = Measurements(self.lines), self.objective == "samples_per_joule"
        rates = {}
        for index, line in enumerate(self.attempts):
            rate, half = None, 0.0
            if isinstance(line, Trial):
                if line.is_timed:
                    rate, half = log_rate(line, per_joule=per_joule), NORMAL_95 * math.sqrt(measured.variance(line))
            elif line.role != UNDER_LIMIT:  # the real memory_limit slows every step
                samples = line.samples_per_joule if per_joule else line.samples_per_s
                rate = math.log(samples) if samples else None
            if rate is not None:
                rates[index] = _interval(rate, half)
        return rates

    @cached_property
    def values(self) -> Mapping[int, Interval]:
        """The objective in its unit (seconds for time) of each trial and run by its index in `attempts`."""
        lines = {index: self.attempts[index] for index in self.rates}
        return {
            index: self.value_of(line.candidate_number, self.rates[index], getattr(line, "start_s", None))
            for index, line in lines.items()
        }

    def value_of(self, number: int, rate: Interval, start_s: float | None = None) -> Interval:
        """Return the objective of a candidate at a rate; without `start_s` its process start is the expected one."""
        candidate = self.candidate(number)
        if start_s is None:
            start_s = self._starts.seconds(knobs_key(candidate.process_knobs))
        if self.question is None:
            return rate
        # The longest time belongs to the lowest rate.
        rates = (rate.low, rate.median, rate.high)
        low, median, high = sorted(self.question.objective_at(candidate, each, start_s) for each in rates)
        return Interval(median=median, low=low, high=high)

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

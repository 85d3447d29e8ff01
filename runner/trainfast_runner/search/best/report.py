"""The object that `search best --json` prints: the answer with every candidate's verdict and every measurement."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from trainfast_runner.errors import highest
from trainfast_runner.records.json_lines import newest
from trainfast_runner.records.result import Doubt
from trainfast_runner.results.distributions import NORMAL_95
from trainfast_runner.search.best.answer import verdicts_without_answer
from trainfast_runner.search.best.candidates import objective_interval
from trainfast_runner.search.best.person_instructions import read_instructions
from trainfast_runner.search.best_journal import (
    TIMED_OUTCOMES,
    UNDER_LIMIT,
    Attempt,
    BestAnswer,
    BestEnded,
    BestJournal,
    BestLine,
    BestStep,
    Candidate,
    CandidateVerdict,
    ColdRun,
    EarlierEffect,
    Effect,
    Instruction,
    Interval,
    Space,
    Trial,
    read_best_journal,
)
from trainfast_runner.search.journal import JournalFollower, Waiting, fields_of, first_fields, worked_seconds
from trainfast_runner.search.measured_speeds import ProcessStarts, log_rate, measurements
from trainfast_runner.search.searches import knobs_key

SCRIPT_MEMORY = "the memory of a script is predicted from its trials of like settings"
"""The reason that `predicted_bytes` may be None for a script."""


def best_report(directory: Path) -> dict[str, Any]:
    """Return the whole search as one object; absent figures are None."""
    lines = read_best_journal(directory)
    so_far, end = BestSoFar(tuple(lines)), newest(lines, BestEnded)
    question, space = so_far.question, so_far.space
    assert question is not None, "a search is reported once it has its question"
    return {
        **first_fields(question, end),
        **fields_of(question, "objective", "for_steps", "global_batch", "vary", "left_alone"),
        **_answer(end, so_far),
        "candidates": len(space.candidates) if space is not None else None,
        "dropped": space.dropped if space is not None else None,
        "unpredicted": SCRIPT_MEMORY if question.is_script else None,
        "trials": [_trial(trial, space) for trial in so_far.trials] if space is not None else [],
        "races": [_cold_run(run, space) for run in so_far.cold_runs] if space is not None else [],
        "disturbed": so_far.disturbed_count,
        "orders": [_instruction(instruction, space) for instruction in so_far.instructions],
        "earlier": [_effect(effect, "search_id") for effect in question.earlier],
        **fields_of(end, "missing_bytes", "stopped_because", "seconds"),
    }


def _answer(end: BestEnded | None, so_far: BestSoFar) -> dict[str, Any]:
    """Return the fields of the answer; None and empty lists without one. `winner` is None if the noise is too large."""
    answer, space = end.answer if end is not None else None, so_far.space
    if end is None or answer is None or space is None:
        names = ("winner", "best", "baseline", "gain", "within_percent", "tried_in_budget")
        lists = ("doubts", "ties", "effects", "pareto", "changes_training", "notes")
        verdicts = (
            [] if space is None else [_verdict(verdict, space) for verdict in verdicts_without_answer(so_far.lines)]
        )
        return {**dict.fromkeys(names), **{name: [] for name in lists}, "verdicts": verdicts}
    is_decided = end.state == "answered" and answer.within_percent is None
    best = space.candidates[answer.best_number]
    baseline = space.candidates[space.baseline_number]
    return {
        "winner": best.knobs if is_decided else None,
        "best": {
            **_side(best, answer.best_rate, answer.best_value, answer.best_run_ids),
            "doubts": so_far.doubts_of(answer.best_number),
        },
        "baseline": {
            **_side(baseline, answer.baseline_rate, answer.baseline_value, answer.baseline_run_ids),
            "doubts": so_far.doubts_of(space.baseline_number),
        },
        "doubts": so_far.answer_doubts,
        "gain": _gain(answer.gain_percent),
        "within_percent": answer.within_percent,
        "tried_in_budget": answer.tried_in_budget,
        "ties": [space.candidates[number].knobs for number in answer.tied_numbers],
        "effects": [_effect(effect, "measured", "earlier") for effect in answer.effects],
        "verdicts": [_verdict(verdict, space) for verdict in answer.verdicts],
        "pareto": [_pareto(number, answer, so_far) for number in answer.pareto_numbers],
        "changes_training": answer.changes_training,
        "notes": answer.notes,
    }


def _verdict(verdict: CandidateVerdict, space: Space) -> dict[str, Any]:
    candidate = space.candidates[verdict.candidate_number]
    return {
        "knobs": candidate.knobs,
        **fields_of(verdict, "verdict", "reason", "excess_bytes"),
        "samples_per_s": verdict.rate,
        "predicted_bytes": candidate.predicted_bytes,
    }


def _side(candidate: Candidate, rate: Interval | None, value: Interval | None, run_ids: list[str]) -> dict[str, Any]:
    """Return the winner or the baseline; `value` is the objective."""
    return {
        "knobs": candidate.knobs,
        "samples_per_s": rate,
        "value": value,
        "predicted_bytes": candidate.predicted_bytes,
        "run_id": run_ids[0] if run_ids else None,
        "run_ids": run_ids,
    }


def _gain(percent: Interval | None) -> dict[str, float] | None:
    return None if percent is None else {"percent": percent.median, "low": percent.low, "high": percent.high}


def _effect(effect: Effect | EarlierEffect, *more_fields: str) -> dict[str, Any]:
    gain = {"from": effect.before, "gain": _gain(effect.gain_percent)}
    return {**fields_of(effect, "knob", "value"), **gain, **fields_of(effect, *more_fields)}


def _instruction(instruction: Instruction, space: Space | None) -> dict[str, Any]:
    """Return an instruction; `knobs` are those of a skipped candidate, else None."""
    number = instruction.candidate_number
    knobs = None if number is None or space is None else space.candidates[number].knobs
    return {"do": instruction.do, "knob": instruction.knob or None, "value": instruction.value, "knobs": knobs}


def _trial(line: Trial, space: Space) -> dict[str, Any]:
    end_fields = "outcome", "reason", "missing_bytes"
    return {
        "knobs": space.candidates[line.candidate_number].knobs,
        "samples_per_s": _rate(line),
        "steps": len(line.step_ms),
        **fields_of(line, "warm", *end_fields, "doubts", "seconds", "peak_allocated_bytes", "run_id", "repeats"),
    }


def _cold_run(line: ColdRun, space: Space) -> dict[str, Any]:
    figure_fields = "samples_per_joule", "start_s", "peak_allocated_bytes", "seconds"
    return {
        "knobs": space.candidates[line.candidate_number].knobs,
        "samples_per_s": None if line.samples_per_s is None else {"median": line.samples_per_s, "mad": line.mad},
        "predicted": line.predicted,
        **fields_of(line, "role", "knob", "outcome", *figure_fields, "run_id", "reason", "missing_bytes", "doubts"),
    }


def _rate(line: Trial) -> dict[str, float] | None:
    """Return the samples/s of a trial: median and median absolute deviation over steps; None without a timed step."""
    rates = [1000 * line.samples_per_step / ms for ms in line.step_ms if ms > 0]
    if not rates:
        return None
    middle = statistics.median(rates)
    return {"median": middle, "mad": statistics.median(abs(rate - middle) for rate in rates)}


def _pareto(number: int, answer: BestAnswer, so_far: BestSoFar) -> dict[str, Any]:
    """Return a candidate that no other beats in both speed and memory, with its highest measured peak."""
    rate = next((verdict.rate for verdict in answer.verdicts if verdict.candidate_number == number), None)
    return {
        "knobs": so_far.candidate(number).knobs,
        "samples_per_s": rate,
        "peak_allocated_bytes": so_far.peak_bytes(number),
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

    @property
    def candidates(self) -> list[Candidate]:
        """All candidates, by number; empty before they are listed."""
        return self.space.candidates if self.space is not None else []

    def candidate(self, number: int) -> Candidate:
        """Return a candidate; one without knobs for a number that a damaged journal does not list."""
        return self.candidates[number] if 0 <= number < len(self.candidates) else Candidate(knobs={})

    def peak_bytes(self, number: int) -> int | None:
        """The highest measured peak of a candidate; None if none was measured."""
        return highest(line.peak_allocated_bytes for line in self.attempts if line.candidate_number == number)

    def memory_bytes(self, number: int) -> int | None:
        """The highest measured peak of a candidate, else its prediction; None without either."""
        peak_bytes = self.peak_bytes(number)
        return self.candidate(number).predicted_bytes if peak_bytes is None else peak_bytes

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

"""A best-fit search's journal for screens and reports: the best candidate so far, rates, memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from trainfast_runner.known_values import highest
from trainfast_runner.records.result import Doubt
from trainfast_runner.results.distributions import NORMAL_95
from trainfast_runner.search.best.objective import objective_interval
from trainfast_runner.search.journal.best import (
    TIMED_OUTCOMES,
    UNDER_LIMIT,
    Attempt,
    BestJournal,
    BestStep,
    Candidate,
    ColdRun,
    Interval,
)
from trainfast_runner.search.journal.lines import Waiting, worked_seconds
from trainfast_runner.search.speed.process_starts import ProcessStarts, knobs_key
from trainfast_runner.search.speed.trial_rates import log_rate, measurements


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

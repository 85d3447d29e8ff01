"""The state of a best-fit search, from its journal: the remaining candidates, their rates and costs."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from trainfast_runner.search.best.candidates import TOO_LARGE, changes_training, log_objective, oom_verdict, seq_len_of
from trainfast_runner.search.best.person_instructions import excluded_by_instructions
from trainfast_runner.search.best_journal import (
    TIMED_OUTCOMES,
    UNDER_LIMIT,
    Attempt,
    AttemptOutcome,
    BestJournal,
    BestLaunched,
    BestLine,
    BestQuestion,
    Candidate,
    CandidateVerdict,
    ColdRun,
    ProcessReady,
    Space,
    Trial,
)
from trainfast_runner.search.effects import (
    Array,
    Levels,
    Measurements,
    Posterior,
    ProcessStarts,
    fit_effects,
    log_rate,
    measurements,
    reference_of,
)
from trainfast_runner.search.searches import BATCH_KNOBS, KnobsKey, knobs_key, value_text

WORTHWHILE_PERCENT = 2
"""The least gain that is worth further trials."""
WORTHWHILE_LOG_GAIN = math.log1p(WORTHWHILE_PERCENT / 100)
"""The same gain, in ln rate."""
MIN_GAIN_VARIANCE = 1e-12
"""Variance of a gain at least: rounding can leave a difference of two variances at zero or below."""
_erfc = np.vectorize(math.erfc, otypes=[float])


class LogGains(NamedTuple):
    """The predicted ln of each candidate's objective over another candidate's: normal distributions."""

    mean: Array
    deviation: Array

    def chance_above(self, log_gain: float) -> Array:
        """Return the probability that each gain exceeds `log_gain`."""
        chances: Array = 0.5 * _erfc((log_gain - self.mean) / self.deviation / math.sqrt(2))
        return chances


@dataclass(frozen=True, kw_only=True)
class BestState:
    """The state of a search at one moment, once its candidates are listed. Arrays are by candidate number."""

    journal: BestJournal
    question: BestQuestion
    space: Space
    measured: Measurements
    posterior: Posterior
    spent_s: float
    """Seconds that conductors worked on the search."""
    warm_run_id: str | None
    """The run of the warm process; None without one."""
    starts: ProcessStarts = field(repr=False)
    process_keys: Sequence[KnobsKey] = field(repr=False)
    """The process of each candidate."""

    @property
    def candidates(self) -> Sequence[Candidate]:
        """All candidates, by number."""
        return self.space.candidates

    @property
    def needs_limit_run(self) -> bool:
        """True if the answer has to run under `memory_limit`, which no trial of a preset is under."""
        return bool(self.question.limits_bytes) and not self.question.is_script

    @cached_property
    def counted_trials(self) -> dict[int, list[Trial]]:
        """The trials that count, by candidate."""
        by_candidate: dict[int, list[Trial]] = defaultdict(list)
        for trial in self.measured.trials:
            by_candidate[trial.candidate_number].append(trial)
        return dict(by_candidate)

    @cached_property
    def ruled_out(self) -> dict[int, CandidateVerdict]:
        """The candidates that can no longer be the answer, by number, with their verdicts."""
        return _verdicts_ruling_out(self.space, self.journal.attempts, self.posterior.levels)

    @cached_property
    def excluded_by_instructions(self) -> dict[int, str]:
        """The candidates that a person left out, by number, with the instruction; the baseline is measured anyway."""
        return excluded_by_instructions(self.candidates, self.journal.instructions)

    @cached_property
    def remaining(self) -> list[int]:
        """Numbers of the candidates that may still be the answer."""
        out = self.ruled_out.keys() | self.excluded_by_instructions.keys()
        return [number for number in range(len(self.candidates)) if number not in out]

    @cached_property
    def leader_number(self) -> int | None:
        """The measured candidate of the highest objective; None before any was measured."""
        measured_numbers = [number for number in self.remaining if number in self.counted_trials]
        return max(measured_numbers, key=self.log_objectives[0].__getitem__, default=None)

    @cached_property
    def log_objectives(self) -> tuple[Array, Array]:
        """The ln of each candidate's objective by the effects model, and its derivative by the ln rate.

        For `time`, T = start + steps x samples / rate: d(-ln T) / d(ln rate) = (T - start) / T.
        """
        log_rates, question = self.posterior.mean, self.question
        if question.objective == "time":
            start_s = np.array([self.starts.seconds(key) for key in self.process_keys])
            work_s = (question.for_steps or 1) * self._samples / np.exp(log_rates)
            return -np.log(start_s + work_s), work_s / (start_s + work_s)
        if question.objective == "tokens_per_s":
            log_rates = log_rates + np.log([seq_len_of(question, candidate) for candidate in self.candidates])
        return log_rates, np.ones_like(log_rates)

    def log_gains(self, other_number: int) -> LogGains:
        """Return the ln of each candidate's objective over another's by the effects model."""
        values, slopes = self.log_objectives
        variances, covariances = self.posterior.variance, self.posterior.covariances(other_number)
        slope = slopes[other_number]
        variance = slopes**2 * variances + slope**2 * variances[other_number] - 2 * slopes * slope * covariances
        return LogGains(values - values[other_number], np.sqrt(np.maximum(variance, MIN_GAIN_VARIANCE)))

    @cached_property
    def bound_numbers(self) -> frozenset[int]:
        """The candidates whose FLOPs alone take longer than the leader's whole sample; empty for joules."""
        if self.leader_number is None or self.question.objective == "samples_per_joule":
            return frozenset()
        leader_value = float(self.log_objectives[0][self.leader_number])
        return frozenset(
            number
            for number, candidate in enumerate(self.candidates)
            if (least_s := candidate.least_s_per_sample)
            and log_objective(self.question, candidate, 1 / least_s, self.start_s(number)) < leader_value
        )

    @cached_property
    def step_s(self) -> Array:
        """The expected seconds of each candidate's step; at the highest measured rate if the model is of joules."""
        log_rates: Array | float = self.posterior.mean
        if self.question.objective == "samples_per_joule":
            log_rates = max((log_rate(trial) or 0.0 for trial in self.measured.trials), default=0.0)
        seconds: Array = self._samples / np.exp(log_rates)
        return seconds

    @cached_property
    def _samples(self) -> Array:
        return np.array([candidate.samples_per_step for candidate in self.candidates], dtype=float)

    @cached_property
    def warm_process_key(self) -> KnobsKey | None:
        """The knobs of the warm process; None without one."""
        for line in self.journal.lines:
            if isinstance(line, ProcessReady) and line.run_id == self.warm_run_id:
                return knobs_key(line.process_knobs)
            if isinstance(line, BestLaunched) and line.run_id == self.warm_run_id:
                return self.process_keys[line.candidate_number]
        return None

    def is_warm(self, number: int) -> bool:
        """True if the warm process can try this candidate."""
        return self.warm_process_key is not None and self.process_keys[number] == self.warm_process_key

    def start_s(self, number: int) -> float:
        """Return the expected seconds until a process of a candidate takes its first timed step."""
        return self.starts.seconds(self.process_keys[number])

    @cached_property
    def warm_trials(self) -> list[Trial]:
        """The trials in the warm process."""
        return [trial for trial in self.journal.trials if trial.run_id == self.warm_run_id]

    @cached_property
    def reference_trial(self) -> Trial | None:
        """The trial in the warm process whose repeat shows drift: the first that was not given up as slow."""
        return reference_of(self.warm_trials)

    def changes_training(self, number: int) -> list[str]:
        """Return the knobs by which a candidate trains differently from the baseline."""
        return changes_training(self.candidates[number], self.candidates[self.space.baseline_number])


def state_of_best_journal(lines: Sequence[BestLine], spent_s: float, warm_run_id: str | None = None) -> BestState:
    """Return the state after these lines."""
    journal = BestJournal(tuple(lines))
    question, space = journal.question, journal.space
    assert question is not None, "a journal begins with its question"
    assert space is not None, "the candidates are listed before the first decision"
    measured = measurements(lines)
    levels, process_keys = _layout_of(space)
    posterior = fit_effects(levels, measured, per_joule=question.objective == "samples_per_joule")
    return BestState(
        journal=journal,
        question=question,
        space=space,
        measured=measured,
        posterior=posterior,
        spent_s=spent_s,
        warm_run_id=warm_run_id,
        starts=ProcessStarts(lines),
        process_keys=process_keys,
    )


@lru_cache(maxsize=1)
def _layout_of(space: Space) -> tuple[Levels, list[KnobsKey]]:
    """Return the levels of the candidates, and the process of each: made once, as they take half of a decision."""
    keys = [knobs_key(candidate.process_knobs) for candidate in space.candidates]
    return Levels([candidate.knobs for candidate in space.candidates]), keys


MAX_VOID_ATTEMPTS = 3
"""A candidate with this many void trials or runs is given up."""
UNUSABLE_OUTCOMES: tuple[AttemptOutcome, ...] = ("failed", "incompatible")
"""Outcomes of a candidate that is never the answer."""
LOSS_SHARE = 0.05
"""A loss leaves the baseline's if the difference is over this share of the baseline's last or first loss.

fp16 and bf16 stay within a few percent.
"""


def _verdicts_ruling_out(space: Space, attempts: Sequence[Attempt], levels: Levels) -> dict[int, CandidateVerdict]:
    """Return the first verdict on each candidate that is ruled out, by its number."""
    verdicts: dict[int, CandidateVerdict] = {}

    def rule_out(number: int, verdict: str, reason: str, excess_bytes: int | None = None) -> None:
        ruled = CandidateVerdict(candidate_number=number, verdict=verdict, reason=reason, excess_bytes=excess_bytes)
        verdicts.setdefault(number, ruled)

    for number, candidate in enumerate(space.candidates):
        if candidate.excluded_as is not None:
            rule_out(number, candidate.excluded_as, candidate.reason, candidate.excess_bytes)
    timed_numbers = {attempt.candidate_number for attempt in attempts if attempt.outcome in TIMED_OUTCOMES}
    void_attempts: dict[int, list[Attempt]] = defaultdict(list)
    for attempt in attempts:
        number = attempt.candidate_number
        if attempt.outcome == "oom":
            reason, excess_bytes = oom_verdict(attempt, space.candidates[number])
            rule_out(number, TOO_LARGE, reason, excess_bytes)
            # Trials are not under memory_limit: one that fitted is no evidence for a run under the limit.
            fitted = set() if isinstance(attempt, ColdRun) and attempt.role == UNDER_LIMIT else timed_numbers
            for larger_number in _larger_batches(number, space.candidates):
                if larger_number not in fitted:
                    rule_out(larger_number, TOO_LARGE, f"a smaller batch: {reason}", excess_bytes)
        elif attempt.outcome in UNUSABLE_OUTCOMES:
            rule_out(number, attempt.outcome, attempt.reason)
        elif attempt.outcome == "void":
            void_attempts[number].append(attempt)
    for number, void in void_attempts.items():
        if len(void) >= MAX_VOID_ATTEMPTS and number not in timed_numbers:
            rule_out(number, "not_tried", void_text(void))
    for number, reason in _other_losses(space, attempts):
        rule_out(number, "failed", reason)
    for number, outcome, reason in _failed_values(attempts, timed_numbers, levels):
        rule_out(number, outcome, reason)
    return verdicts


def void_text(void_attempts: Sequence[Attempt]) -> str:
    """Return, in words, the number of void trials of a candidate, and the reason that the last one does not count."""
    return f"void in {len(void_attempts)} trials; the last: {void_attempts[-1].reason}"


def _larger_batches(number: int, candidates: Sequence[Candidate]) -> list[int]:
    """Return the candidates that differ from candidate `number` only by a larger batch."""
    knobs, batch_size = candidates[number].knobs, candidates[number].batch_size
    same = {name: value for name, value in knobs.items() if name not in BATCH_KNOBS}.items()
    return [
        other_number
        for other_number, other in enumerate(candidates)
        if other.batch_size > batch_size and same <= other.knobs.items()
    ]


def _other_losses(space: Space, attempts: Sequence[Attempt]) -> Iterator[tuple[int, str]]:
    """Yield the candidates that train the same as the baseline and reach another loss on the same samples."""
    baseline = space.candidates[space.baseline_number]
    for kind in (Trial, ColdRun):
        compared = [
            line for line in attempts if isinstance(line, kind) and line.outcome in TIMED_OUTCOMES and line.losses
        ]
        expected = next((line.losses for line in compared if line.candidate_number == space.baseline_number), [])
        for line in compared if expected else ():
            step = min(len(line.losses), len(expected)) - 1
            loss, expected_loss = line.losses[step], expected[step]
            if loss is None or expected_loss is None:
                continue
            # After a large fall the tolerance is a share of the first loss, not of the small last one.
            is_other = abs(loss - expected_loss) > LOSS_SHARE * max(abs(expected_loss), abs(expected[0] or 0.0))
            if is_other and not changes_training(space.candidates[line.candidate_number], baseline):
                yield line.candidate_number, f"the loss was {loss:.4g} where the baseline's was {expected_loss:.4g}"


def _failed_values(
    attempts: Sequence[Attempt], timed_numbers: Collection[int], levels: Levels
) -> Iterator[tuple[int, str, str]]:
    """Yield the candidates with the knob values that two failed candidates share and no timed one has."""
    failed = {attempt.candidate_number: attempt for attempt in attempts if attempt.outcome in UNUSABLE_OUTCOMES}
    timed_pairs = {pair for number in timed_numbers for pair in enumerate(levels.points[number])}
    suspects = {number: set(enumerate(levels.points[number])) - timed_pairs for number in failed}
    shared = (suspects[one] & suspects[other] for one, other in itertools.combinations(failed, 2))
    for cause in dict.fromkeys(frozenset(pairs) for pairs in shared if pairs):
        first, *more = [failed[number] for number in failed if cause <= suspects[number]]
        names = [(levels.names[index], level) for index, level in sorted(cause)]
        text = " with ".join(f"{name}={value_text(name, levels.values[name][level])}" for name, level in names)
        reason = f"{text} failed in {1 + len(more)} settings: {first.reason}"
        for number, point in enumerate(levels.points):
            if all(point[index] == level for index, level in cause):
                yield number, first.outcome, reason

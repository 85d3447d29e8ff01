"""The state of a best-fit search, from its journal: the remaining candidates, their rates and costs."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from trainfast_runner.search.best.candidates import LogGain, LogObjective, changes_training, log_objective
from trainfast_runner.search.best.person_instructions import excluded_by_instructions
from trainfast_runner.search.best.ruled_out import verdicts_ruling_out
from trainfast_runner.search.best_journal import (
    TIMED_OUTCOMES,
    BestJournal,
    BestLaunched,
    BestLine,
    BestQuestion,
    Candidate,
    CandidateVerdict,
    ProcessReady,
    Space,
    Trial,
)
from trainfast_runner.search.effects import Levels, Posterior, fit_effects
from trainfast_runner.search.measured_speeds import (
    Measurements,
    ProcessStarts,
    log_rate,
    measurements,
    reference_of,
    switch_seconds,
)
from trainfast_runner.search.searches import KnobsKey, knobs_key

WORTHWHILE_PERCENT = 2
"""The least gain that is worth further trials."""
WORTHWHILE_LOG_GAIN = math.log1p(WORTHWHILE_PERCENT / 100)
"""The same gain, in ln rate."""
MIN_GAIN_VARIANCE = 1e-12
"""Variance of a gain at least: rounding can leave a difference of two variances at zero or below."""


@dataclass(frozen=True, kw_only=True)
class BestState:
    """The state of a search at one moment, once its candidates are listed."""

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
    def untested_limits(self) -> list[int]:
        """Bytes of each rank under a `memory_limit` that no trial was under; empty without a limit, and for a script.

        A script's trials are all under its limit.
        """
        return [] if self.question.is_script else self.question.limits_bytes

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
        return verdicts_ruling_out(self.space, self.journal.attempts, self.counted_trials, self.posterior.levels)

    @cached_property
    def excluded_by_instructions(self) -> dict[int, str]:
        """The candidates that a person left out, by number, with the instruction; the baseline is measured anyway."""
        return excluded_by_instructions(self.candidates, self.journal.instructions)

    @cached_property
    def remaining(self) -> list[int]:
        """Numbers of the candidates that may still be the answer."""
        return [
            number
            for number in range(len(self.candidates))
            if number not in self.ruled_out and number not in self.excluded_by_instructions
        ]

    @cached_property
    def leader_number(self) -> int | None:
        """The measured candidate of the highest objective; None before any was measured."""
        measured_numbers = [number for number in self.remaining if number in self.counted_trials]
        return max(measured_numbers, key=lambda number: self.log_objective(number).value, default=None)

    def log_objective(self, number: int) -> LogObjective:
        """Return the ln of the objective of a candidate by the effects model."""
        return self._log_objective_at(number, self.posterior.mean[number])

    def _log_objective_at(self, number: int, candidate_log_rate: float) -> LogObjective:
        # The starts of thousands of candidates are looked up only where they matter.
        start_s = self.start_s(number) if self.question.objective == "time" else 0.0
        return log_objective(self.question, self.candidates[number], candidate_log_rate, start_s)

    def log_gain(self, number: int, other_number: int) -> LogGain:
        """Return the ln of one candidate's objective over another's by the effects model."""
        return self.log_gains((number,), other_number)[number]

    def log_gains(self, numbers: Iterable[int], other_number: int) -> dict[int, LogGain]:
        """Return the ln of each candidate's objective over another's, by its number."""
        other_value, other_slope = self.log_objective(other_number)
        means, variances = self.posterior.mean, self.posterior.variance
        covariances = self.posterior.covariances(other_number)
        other_variance = other_slope**2 * variances[other_number]
        gains = {}
        for number in numbers:
            value, slope = self._log_objective_at(number, means[number])
            variance = slope**2 * variances[number] + other_variance - 2 * slope * other_slope * covariances[number]
            gains[number] = LogGain(value - other_value, math.sqrt(max(variance, MIN_GAIN_VARIANCE)))
        return gains

    def is_bound(self, number: int, leader_number: int) -> bool:
        """True if a candidate's FLOPs alone take longer than the leader's whole sample."""
        least_s = self.candidates[number].least_s_per_sample
        if not least_s or self.question.objective == "samples_per_joule":
            return False
        return self._log_objective_at(number, -math.log(least_s)).value < self.log_objective(leader_number).value

    def step_s(self, number: int) -> float:
        """Return the expected seconds of an optimizer step; at the highest measured rate if the model is of joules."""
        candidate_log_rate = self.posterior.mean[number] if self._highest_log_rate is None else self._highest_log_rate
        return self.candidates[number].samples_per_step / math.exp(candidate_log_rate)

    @cached_property
    def _highest_log_rate(self) -> float | None:
        """The highest measured ln samples/s of a search for samples/J, 0 before any; None for another objective."""
        if self.question.objective != "samples_per_joule":
            return None
        rates = (log_rate(trial) for trials in self.counted_trials.values() for trial in trials)
        return max((rate for rate in rates if rate is not None), default=0.0)

    @cached_property
    def switch_s(self) -> float:
        """Expected seconds of a warm trial without its timed steps."""
        return switch_seconds(self.journal.trials)

    @cached_property
    def warm_process_key(self) -> KnobsKey | None:
        """The knobs of the warm process; None without one, or if its drift voids its trials."""
        if self.warm_run_id in self.measured.void_run_ids:
            return None
        for line in reversed(self.journal.lines):
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

    @cached_property
    def needs_repeat(self) -> bool:
        """True if the warm process timed several candidates since its reference trial, and has not repeated that."""
        if self.reference_trial is None:
            return False
        later_trials = self.warm_trials[self.warm_trials.index(self.reference_trial) :]
        timed = [trial for trial in later_trials if trial.outcome in TIMED_OUTCOMES]
        return len({trial.candidate_number for trial in timed}) > 1 and not any(trial.repeats for trial in timed)

    def changes_training(self, number: int) -> list[str]:
        """Return the knobs by which a candidate trains differently from the baseline."""
        return changes_training(self.candidates[number], self.candidates[self.space.baseline_number])


def state_of_best_journal(
    lines: Sequence[BestLine], spent_s: float, warm_run_id: str | None = None, *, voids_drifted: bool = True
) -> BestState:
    """Return the state after these lines.

    Without `voids_drifted` the trials of processes that drifted count, with the drift as noise.
    """
    journal = BestJournal(tuple(lines))
    question, space = journal.question, journal.space
    assert question is not None, "a journal begins with its question"
    assert space is not None, "the candidates are listed before the first decision"
    measured = measurements(lines, voids_drifted=voids_drifted)
    posterior = fit_effects(
        Levels([candidate.knobs for candidate in space.candidates]),
        measured,
        question.earlier,
        space.candidates[space.baseline_number].knobs,
        per_joule=question.objective == "samples_per_joule",
    )
    return BestState(
        journal=journal,
        question=question,
        space=space,
        measured=measured,
        posterior=posterior,
        spent_s=spent_s,
        warm_run_id=warm_run_id,
        starts=ProcessStarts(lines),
        process_keys=[knobs_key(candidate.process_knobs) for candidate in space.candidates],
    )

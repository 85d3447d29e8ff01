"""The state of a best-fit search, from its journal: the candidates that are left, their rates, costs and chances."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import NamedTuple

from trainfast_runner.search.best.candidates import changes_training
from trainfast_runner.search.best.choose.ruled_out import ruled_out
from trainfast_runner.search.best.objective import seq_len_of
from trainfast_runner.search.best.person_orders import excluded_by_orders
from trainfast_runner.search.journal.best import (
    BestJournal,
    BestLaunched,
    BestLine,
    BestQuestion,
    Candidate,
    CandidateVerdict,
    Space,
    Trial,
    Visited,
)
from trainfast_runner.search.speed.effects import Levels, Likelihood, Observation, Posterior, Scales
from trainfast_runner.search.speed.trial_rates import (
    DRIFT,
    MOST_VOID_VISITS,
    Measurements,
    ProcessKey,
    Starts,
    earlier_observations,
    log_rate,
    measurements,
    process_key,
    switch_seconds,
)

WORTHWHILE_LOG_GAIN = math.log(1.02)
"""A gain that is worth going on for, in ln rate."""
MILESTONES = (8, 12, 17, 24, 33, 46, 64, 90)
"""Numbers of observations at which the scales of the effects are chosen anew."""
MAINS, PAIRS, VISITS = (0.15, 0.3, 0.6), (0.04, 0.08, 0.16), (0.003, 0.01, 0.03, 0.08)


class LogObjective(NamedTuple):
    """The ln of an objective, higher is better."""

    value: float
    slope: float
    """Its change with that of the ln rate."""


@dataclass(frozen=True)
class BestState(BestJournal):
    """The state of a search after `spent_s` seconds; `warm_run_id` is the process that waits for its next trial."""

    question: BestQuestion
    space: Space
    measured: Measurements
    posterior: Posterior
    spent_s: float
    warm_run_id: str | None
    starts: Starts = field(repr=False)
    process_keys: Sequence[ProcessKey] = field(repr=False)
    """The process of each candidate."""

    @property
    def candidates(self) -> Sequence[Candidate]:
        """All candidates, by number."""
        return self.space.candidates

    @property
    def untested_limits(self) -> list[int]:
        """Bytes of each rank under `memory_limit`; empty without one, and where every trial is under it."""
        return [] if self.question.limits_trials else self.question.limits_bytes

    @cached_property
    def counted_trials(self) -> dict[int, list[Trial]]:
        """The trials that count, by candidate."""
        by_candidate: dict[int, list[Trial]] = defaultdict(list)
        for trial in self.measured.trials:
            by_candidate[trial.candidate_number].append(trial)
        return dict(by_candidate)

    @cached_property
    def ruled_out(self) -> dict[int, CandidateVerdict]:
        """The candidates that can no longer be the answer, each with its verdict."""
        return ruled_out(self.space, self.attempts, self.counted_trials, self.posterior.levels)

    @cached_property
    def excluded_by_orders(self) -> dict[int, str]:
        """The candidates that the person's orders leave out, each with the order. The baseline is always measured."""
        return excluded_by_orders(self.candidates, self.orders)

    @cached_property
    def alive(self) -> list[int]:
        """The candidates that may still be the answer."""
        ruled_out, excluded_by_orders = self.ruled_out, self.excluded_by_orders
        return [
            number
            for number in range(len(self.candidates))
            if number not in ruled_out and number not in excluded_by_orders
        ]

    @cached_property
    def leader(self) -> int | None:
        """The measured candidate of the highest objective; None before any was measured."""
        measured = [number for number in self.alive if number in self.counted_trials]
        return max(measured, key=lambda number: self.log_objective(number).value, default=None)

    def log_objective(self, number: int) -> LogObjective:
        """The ln of the objective of a candidate by the model.

        For `time`, T = start + steps x samples / rate: d(-ln T) / d(ln rate) = (T - start) / T.
        """
        mean = self.posterior.mean[number]
        return self.log_objective_at(number, mean)

    def log_objective_at(self, number: int, log_of_rate: float) -> LogObjective:
        """The ln of the objective at another ln rate of the candidate."""
        objective = self.question.objective
        if objective in ("samples_per_s", "samples_per_joule"):
            return LogObjective(log_of_rate, 1.0)
        candidate = self.candidates[number]
        if objective == "tokens_per_s":
            return LogObjective(log_of_rate + math.log(self.seq_len(candidate)), 1.0)
        start = self.start_s(number)
        work = (self.question.for_steps or 1) * candidate.samples_per_step / math.exp(log_of_rate)
        return LogObjective(-math.log(start + work), work / (start + work))

    def seq_len(self, candidate: Candidate) -> int:
        """Tokens of a sample of a candidate."""
        return seq_len_of(self.question, candidate)

    def is_bound(self, number: int, leader: int) -> bool:
        """True if its FLOPs alone take longer than the leader's whole sample."""
        least = self.candidates[number].least_s_per_sample
        if not least or self.question.objective == "samples_per_joule":
            return False
        return self.log_objective_at(number, -math.log(least)).value < self.log_objective(leader).value

    def step_s(self, number: int) -> float:
        """Expected seconds of an optimizer step."""
        return self.candidates[number].samples_per_step / math.exp(self._log_rate(number))

    def _log_rate(self, number: int) -> float:
        """The ln samples/s of a candidate; the fastest's where the model is of joules."""
        return self.posterior.mean[number] if self._fastest is None else self._fastest

    @cached_property
    def _fastest(self) -> float | None:
        if self.question.objective != "samples_per_joule":
            return None
        rates = (log_rate(trial) for trials in self.counted_trials.values() for trial in trials)
        return max((rate for rate in rates if rate is not None), default=0.0)

    @cached_property
    def switch_s(self) -> float:
        """Expected seconds of a warm trial beside its timed steps."""
        return switch_seconds(self.trials)

    @cached_property
    def warm_process_key(self) -> ProcessKey | None:
        """The knobs of the process that waits; None without one, or where its drift voids all that it measures."""
        if self.warm_run_id in self.measured.void:
            return None
        for line in reversed(self.lines):
            if isinstance(line, Visited) and line.run_id == self.warm_run_id:
                return process_key(line.process_knobs)
            if isinstance(line, BestLaunched) and line.run_id == self.warm_run_id:
                return self.process_keys[line.candidate_number]
        return None

    def is_warm(self, number: int) -> bool:
        """True if the process that waits can try this candidate."""
        return self.warm_process_key is not None and self.process_keys[number] == self.warm_process_key

    def start_s(self, number: int) -> float:
        """Expected seconds until a process of a candidate takes its first timed step."""
        return self.starts.seconds(self.process_keys[number])

    @cached_property
    def trials_of_visit(self) -> list[Trial]:
        """The trials in the process that waits."""
        return [trial for trial in self.trials if trial.run_id == self.warm_run_id]

    def changes_training(self, number: int) -> list[str]:
        """The knobs by which a candidate trains differently from the baseline."""
        return changes_training(self.candidates[number], self.candidates[self.space.baseline])


def state_of_best_journal(
    lines: Sequence[BestLine],
    spent_s: float,
    warm_run_id: str | None = None,
    before: BestState | None = None,
    *,
    voids_drifted: bool = True,
) -> BestState:
    """Return the state after these lines. `before` is the state at an earlier line, whose posterior is extended.

    Without `voids_drifted` the trials of processes that drifted count, with the drift as noise.
    """
    question = next(line for line in lines if isinstance(line, BestQuestion))
    space = next(line for line in reversed(lines) if isinstance(line, Space))
    measured = measurements(lines, voids_drifted=voids_drifted)
    levels = (
        before.posterior.levels if before is not None else Levels([candidate.knobs for candidate in space.candidates])
    )
    observations = measured.observations(levels, question.objective == "samples_per_joule")
    baseline = space.candidates[space.baseline].knobs
    earlier = earlier_observations(levels, question.earlier, baseline)
    posterior = _posterior(levels, [*earlier, *observations], len(earlier), measured, before)
    keys = before.process_keys if before else [process_key(candidate.process_knobs) for candidate in space.candidates]
    return BestState(tuple(lines), question, space, measured, posterior, spent_s, warm_run_id, Starts(lines), keys)


def _posterior(
    levels: Levels,
    observations: Sequence[Observation],
    earlier: int,
    measured: Measurements,
    before: BestState | None,
) -> Posterior:
    """The posterior after these observations, from the one of `before` where that only lacks the last of them."""
    own_observations = observations[earlier:]
    center = own_observations[0].value if own_observations else 0.0
    scales = _scales(levels, center, observations, len(own_observations), measured, before)
    posterior = before.posterior if before is not None else None
    if (
        posterior is None
        or posterior.scales != scales
        or posterior.center != center
        or list(posterior.observations) != list(observations[: len(posterior.observations)])
    ):
        posterior = Posterior(levels, scales, center)
    for observation in observations[len(posterior.observations) :]:
        posterior.add(observation)
    return posterior


def _scales(
    levels: Levels,
    center: float,
    observations: Sequence[Observation],
    count: int,
    measured: Measurements,
    before: BestState | None,
) -> Scales:
    """The scales of the greatest likelihood for the observations up to the last milestone."""
    milestone = max((number for number in MILESTONES if number <= count), default=None)
    if milestone is None:
        return Scales()
    seen = observations[: len(observations) - count + milestone]
    if before is not None and list(before.posterior.observations[: len(seen)]) == list(seen):
        return before.posterior.scales
    least = _drift_deviation(measured)
    visits = [visit for visit in VISITS if visit >= least] or [least]

    score = cache(Likelihood(levels, seen, center).log_of)
    best = Scales(visit=min(visits, key=lambda visit: abs(visit - Scales().visit)))
    for _ in range(2):
        best = max((replace(best, main=main) for main in MAINS), key=score)
        best = max((replace(best, pair=pair) for pair in PAIRS), key=score)
        best = max((replace(best, visit=visit) for visit in visits), key=score)
    return best


def _drift_deviation(measured: Measurements) -> float:
    """The least deviation between visits: that within visits, where too many were voided for it to be an accident."""
    if len(measured.void) < MOST_VOID_VISITS or not measured.drifts:
        return 0.0
    square = sum(drift * drift for drift in measured.drifts) / len(measured.drifts)
    return math.sqrt(square / 2) if square > DRIFT * DRIFT else 0.0

"""Finalists, winner and ties of a search by its cold runs, each difference with its interval.

A cold run is a run in a fresh process. The noise of a run is pooled over repeated runs of the same candidate, with the
noise of the trials as four runs' worth of evidence; intervals are Student's.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from trainfast_runner.results.distributions import NORMAL_95, student_95
from trainfast_runner.search.best.choose.state import BestState
from trainfast_runner.search.journal.best import CONFIRM, RACE, TURN_BACK, UNDER_LIMIT, BestLaunched, ColdRun
from trainfast_runner.search.speed.trial_rates import steps_for

NEAR = 0.03
"""Candidates within this of the leader, in ln of the objective, take part in the race."""
MOST_FINALISTS = 4
SURELY_SLOWER = 0.01
"""A candidate with a smaller chance than this to be the fastest takes no part."""
EQUAL = 0.005
"""Candidates that differ by less than this, and by less than the noise, are equal: the simpler one wins."""
NEAR_LIMIT = 0.9
"""A candidate that needs more than this share of memory_limit gets a run under it."""
PRIOR_RUNS = 4
"""The noise of the trials counts as this many repeated runs."""
EQUAL_MEMORY_SHARE = 0.05
"""Memory that differs by less than this share is the same."""
COLD_ERROR = 0.007
"""Standard error of a cold run's median, as a share of the median, at which the number of steps aims."""
COLD_LEAST, COLD_MOST = 8, 60
"""Timed steps of a cold run, at least and at most."""
CONFIRMING_RUNS = 4
"""Cold runs that confirm an answer: the winner and the baseline, A B B A."""
CONFIRMING_SHARE = 0.5
"""Share of the budget that is kept for them; the trials have the other half."""
SPEED_ROLES = (RACE, CONFIRM, TURN_BACK)


@dataclass(frozen=True)
class Difference:
    """The ln of one candidate's objective less another's, and half of its 95 % interval."""

    mean: float
    half: float

    @property
    def is_clear(self) -> bool:
        """True if the interval excludes zero."""
        return abs(self.mean) > self.half


class Noise(NamedTuple):
    """The deviation of one run's ln objective, and Student's quantile for its intervals."""

    deviation: float
    quantile: float


class RunsByRole:
    """The runs in some roles that measured something: the ln of their objective, their noise, and differences."""

    def __init__(self, state: BestState, *roles: str) -> None:
        self._state, self._roles = state, roles

    @cached_property
    def log_objectives(self) -> dict[int, list[float]]:
        """The ln of the objective in each run, by candidate."""
        by_candidate: dict[int, list[float]] = defaultdict(list)
        for run in self._state.cold_runs:
            if run.role in self._roles and (value := self.log_objective(run)) is not None:
                by_candidate[run.candidate_number].append(value)
        return dict(by_candidate)

    def log_objective(self, run: ColdRun) -> float | None:
        """The ln of the objective of one run; None if it measured nothing."""
        if run.outcome != "measured" or not run.samples_per_s:
            return None
        question, candidate = self._state.question, self._state.candidates[run.candidate_number]
        if question.objective == "samples_per_joule":
            return math.log(run.samples_per_joule) if run.samples_per_joule else None
        if question.objective == "time":
            return -math.log(run.start_s + (question.for_steps or 1) * candidate.samples_per_step / run.samples_per_s)
        tokens = self._state.seq_len(candidate) if question.objective == "tokens_per_s" else 1
        return math.log(run.samples_per_s * tokens)

    @cached_property
    def noise(self) -> Noise:
        """The noise of a run, pooled over the repeated runs of each candidate."""
        prior = self._state.posterior.scales.visit**2 + COLD_ERROR**2 + self._state.measured.drift_variance
        squares, freedom = PRIOR_RUNS * prior, PRIOR_RUNS
        for values in self.log_objectives.values():
            if len(values) > 1:
                squares += statistics.variance(values) * (len(values) - 1)
                freedom += len(values) - 1
        return Noise(math.sqrt(squares / freedom), student_95(freedom))

    def difference(self, number: int, other: int) -> Difference | None:
        """The ln of `number` over `other`; None unless both were run."""
        mine, theirs = self.log_objectives.get(number), self.log_objectives.get(other)
        if not mine or not theirs:
            return None
        half = self.noise.quantile * self.noise.deviation * math.sqrt(1 / len(mine) + 1 / len(theirs))
        return Difference(statistics.fmean(mine) - statistics.fmean(theirs), half)

    def mean(self, number: int) -> float:
        """The mean ln of the objective of a candidate that was run."""
        return statistics.fmean(self.log_objectives[number])


class ColdRanking:
    """The cold runs made so far, and the candidates that they leave as finalists, winner and ties."""

    def __init__(self, state: BestState) -> None:
        self.state = state
        self.baseline = state.space.baseline
        self.race_runs = RunsByRole(state, RACE)
        self.speed_runs = RunsByRole(state, *SPEED_ROLES)

    def difference(self, number: int, other: int) -> Difference:
        """The ln of the objective of `number` over `other`: by cold runs where both had some, else by the trials."""
        return self.speed_runs.difference(number, other) or self.by_trials(number, other)

    def by_trials(self, number: int, other: int) -> Difference:
        """The ln of the objective of `number` over `other` by the trials and the effects alone."""
        (mine, slope), (theirs, _) = self.state.log_objective(number), self.state.log_objective(other)
        _, variance = self.state.posterior.difference(number, other)
        return Difference(mine - theirs, NORMAL_95 * slope * math.sqrt(variance))

    @property
    def begun(self) -> bool:
        """True once a run in a fresh process was started for its speed: from then on there are no more trials.

        A run under memory_limit may rule out all that was measured.
        """
        runs = (line for line in self.state.lines if isinstance(line, BestLaunched | ColdRun))
        return any(run.role in SPEED_ROLES for run in runs)

    @property
    def counted_runs(self) -> int:
        """Number of runs that count."""
        return sum(run.outcome != "void" for run in self.state.cold_runs)

    @cached_property
    def finalists(self) -> list[int]:
        """The leader, and the measured candidates near it that may be as fast, the fastest first."""
        state, leader = self.state, self.state.leader
        if leader is None:
            return []
        leader_value, slope = state.log_objective(leader)
        values = [(leader_value, leader)]
        for number in state.alive:
            if number == leader or number not in state.counted_trials:
                continue
            value, _ = state.log_objective(number)
            _, variance = state.posterior.difference(number, leader)
            chance = 0.5 * math.erfc((leader_value - value) / max(slope * math.sqrt(2 * variance), 1e-9))
            if leader_value - value < NEAR and chance > SURELY_SLOWER:
                values.append((value, number))
        return [number for _, number in sorted(values, key=lambda pair: (-pair[0], pair[1]))][:MOST_FINALISTS]

    def count_runs(self, number: int, *roles: str) -> int:
        """Number of runs of a candidate in these roles that count."""
        return sum(
            run.candidate_number == number and run.role in roles and run.outcome != "void"
            for run in self.state.cold_runs
        )

    @cached_property
    def contenders(self) -> list[int]:
        """The finalists that are not clearly slower than the fastest in the race."""
        fastest = self._fastest
        if fastest is None:
            return self.finalists
        return [number for number in self.finalists if not self._is_slower(number, fastest)]

    @cached_property
    def equally_fast(self) -> list[int]:
        """The contenders that the race cannot tell from the fastest; the leader alone without a race."""
        fastest = self._fastest
        if fastest is None:
            return self.finalists[:1]
        ran = [number for number in self.contenders if number in self.race_runs.log_objectives]
        return [number for number in ran if number == fastest or self._is_equal(number, fastest)]

    @property
    def _fastest(self) -> int | None:
        ran = [number for number in self.finalists if number in self.race_runs.log_objectives]
        return max(ran, key=self.race_runs.mean, default=None)

    def _is_slower(self, number: int, fastest: int) -> bool:
        difference = self.race_runs.difference(fastest, number)
        return number != fastest and difference is not None and difference.is_clear

    def _is_equal(self, number: int, fastest: int) -> bool:
        difference = self.race_runs.difference(fastest, number)
        return difference is not None and not difference.is_clear and difference.mean < EQUAL

    @property
    def winner(self) -> int:
        """The fastest of the race; among equals the one of less memory, fewer changed knobs, a cheaper start."""
        return min(self.equally_fast, key=self._preference)

    @property
    def answer(self) -> int:
        """The winner, or the baseline if that fits and the runs that confirm show no gain over it."""
        winner = self.winner
        gain = self.speed_runs.difference(winner, self.baseline)
        if gain is None or winner == self.baseline or self.baseline in self.state.ruled_out:
            return winner
        return winner if gain.mean >= EQUAL or (gain.is_clear and gain.mean > 0) else self.baseline

    @cached_property
    def ties(self) -> list[int]:
        """The contenders that the runs cannot tell from the answer."""
        answer = self.answer
        others = [number for number in self.contenders if number != answer]
        return [number for number in others if not self.difference(number, answer).is_clear]

    def _preference(self, number: int) -> tuple[int, int, float]:
        state = self.state
        needed = self.memory_bytes(number)
        memory = 0 if needed is None else round(math.log(max(needed, 1)) / EQUAL_MEMORY_SHARE)
        return memory, len(self.changed(number)), state.start_s(number)

    def memory_bytes(self, number: int) -> int | None:
        """The measured peak of a candidate, or the predicted one."""
        state = self.state
        runs = (*state.cold_runs, *state.counted_trials.get(number, ()))
        peaks = [
            run.peak_allocated_bytes for run in runs if run.candidate_number == number and run.peak_allocated_bytes
        ]
        return max(peaks, default=state.candidates[number].predicted_bytes)

    def changed(self, number: int) -> list[str]:
        """The knobs that differ from the baseline's, without accumulation where the batch decides it."""
        levels = self.state.posterior.levels
        point, base = levels.points[number], levels.points[self.baseline]
        return [name for name, level, base_level in zip(levels.names, point, base, strict=True) if level != base_level]

    def turned_back(self, number: int, knob: str) -> int | None:
        """The candidate with one knob at the baseline's value; None where there is none that can run."""
        levels = self.state.posterior.levels
        base = levels.points[self.baseline][levels.names.index(knob)]
        turned = levels.with_level(number, knob, base)
        return None if turned is None or turned in self.state.ruled_out else turned

    def is_near_limit(self, number: int) -> bool:
        """True if a candidate needs nearly all of memory_limit, or its need is unknown."""
        limits = self.state.untested_limits
        needed = self.memory_bytes(number)
        return bool(limits) and (needed is None or needed > NEAR_LIMIT * min(limits))

    @cached_property
    def unchecked(self) -> list[int]:
        """The measured candidates near memory_limit that had no run under it, the fastest first."""
        state = self.state
        measured = {*state.counted_trials, *self.speed_runs.log_objectives}
        unchecked = [
            number
            for number in state.alive
            if number in measured and self.is_near_limit(number) and not self.count_runs(number, UNDER_LIMIT)
        ]
        return sorted(unchecked, key=lambda number: -state.log_objective(number).value)

    def run_s(self, number: int) -> float:
        """Expected seconds of a run in a fresh process."""
        state = self.state
        return state.start_s(number) + self.steps * state.step_s(number)

    @cached_property
    def steps(self) -> int:
        """Timed steps of each run: enough for `COLD_ERROR`, as far as those that confirm take half of the budget."""
        state = self.state
        needed = steps_for(state.measured.step_deviation, COLD_ERROR, COLD_LEAST, COLD_MOST)
        each_s = CONFIRMING_SHARE * state.question.budget_s / CONFIRMING_RUNS
        sides = {self.baseline, state.leader if state.leader is not None else self.baseline}
        affordable = min((each_s - state.start_s(number)) / state.step_s(number) for number in sides)
        return max(COLD_LEAST, min(needed, int(affordable)))

    def are_affordable(self, numbers: Sequence[int]) -> bool:
        """True if the budget pays for a run of each."""
        state = self.state
        return state.spent_s + sum(map(self.run_s, numbers)) <= state.question.budget_s

    def reserve_s(self) -> float:
        """Expected seconds of the runs that confirm: leader and baseline, twice each."""
        leader = self.state.leader
        return 2 * sum(self.run_s(number) for number in (leader, self.baseline) if number is not None)

"""The objective and the rate that cold runs measured, their noise, and the difference between two candidates.

The noise is pooled over repeated runs of the same candidate, with the noise of the trials as four runs' worth of
evidence; intervals are Student's.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from trainfast_runner.errors import lowest
from trainfast_runner.results.distributions import NORMAL_95, student_95
from trainfast_runner.search.best.candidates import log_objective
from trainfast_runner.search.best.state import BestState
from trainfast_runner.search.best_journal import CONFIRM, RACE, TURN_BACK, UNDER_LIMIT, BestLaunched, ColdRole, ColdRun
from trainfast_runner.search.measured_speeds import steps_for

PRIOR_RUNS = 4
"""The noise of the trials counts as this many repeated runs."""


@dataclass(frozen=True)
class Difference:
    """The ln of one candidate's measured objective less another's, and half of its 95 % interval.

    The predicted difference is a `LogGain`.
    """

    mean: float
    half_width: float

    @property
    def is_clear(self) -> bool:
        """True if the interval excludes zero."""
        return abs(self.mean) > self.half_width


class Noise(NamedTuple):
    """The standard deviation of a figure in ln of one run, and Student's quantile for its intervals."""

    deviation: float
    quantile: float

    def half_width(self, run_count: int) -> float:
        """Return half of the 95 % interval of the mean of this many runs."""
        return self.quantile * self.deviation / math.sqrt(run_count)


class MeasuredRuns:
    """The cold runs in some roles that measured the objective, and the differences that they show."""

    def __init__(self, state: BestState, *roles: ColdRole) -> None:
        self._state, self._roles = state, roles

    @cached_property
    def log_objectives(self) -> dict[int, list[float]]:
        """The ln of the objective in each run, by candidate number."""
        return self._by_candidate(self._log_objective)

    @cached_property
    def log_rates(self) -> dict[int, list[float]]:
        """The ln samples/s of each run, by candidate number."""
        return self._by_candidate(_log_rate_of)

    def _by_candidate(self, figure_of: Callable[[ColdRun], float | None]) -> dict[int, list[float]]:
        by_candidate: dict[int, list[float]] = defaultdict(list)
        for run in self._state.journal.cold_runs:
            if run.role in self._roles and (figure := figure_of(run)) is not None:
                by_candidate[run.candidate_number].append(figure)
        return dict(by_candidate)

    def _log_objective(self, run: ColdRun) -> float | None:
        """Return the ln of the objective of one run; None if the run measured nothing."""
        question = self._state.question
        rate = run.samples_per_joule if question.objective == "samples_per_joule" else run.samples_per_s
        if run.outcome != "measured" or not rate:
            return None
        candidate = self._state.candidates[run.candidate_number]
        return log_objective(question, candidate, math.log(rate), run.start_s).value

    @cached_property
    def noise(self) -> Noise:
        """The noise of a run's objective, pooled over the repeated runs of each candidate."""
        return self._pooled_noise(self.log_objectives)

    @cached_property
    def rate_noise(self) -> Noise:
        """The noise of a run's samples/s, pooled as that of the objective."""
        return self._pooled_noise(self.log_rates)

    def _pooled_noise(self, figures: Mapping[int, Sequence[float]]) -> Noise:
        prior = self._state.posterior.scales.process**2 + COLD_ERROR**2 + self._state.measured.drift_variance
        squares, freedom = PRIOR_RUNS * prior, PRIOR_RUNS
        for values in figures.values():
            if len(values) > 1:
                squares += statistics.variance(values) * (len(values) - 1)
                freedom += len(values) - 1
        return Noise(math.sqrt(squares / freedom), student_95(freedom))

    def difference(self, number: int, other_number: int) -> Difference | None:
        """Return the ln of the objective of candidate `number` less that of the other; None unless both were run."""
        values = self.log_objectives.get(number)
        other_values = self.log_objectives.get(other_number)
        if not values or not other_values:
            return None
        half_width = self.noise.quantile * self.noise.deviation * math.sqrt(1 / len(values) + 1 / len(other_values))
        return Difference(statistics.fmean(values) - statistics.fmean(other_values), half_width)

    def mean(self, number: int) -> float:
        """Return the mean ln of the objective of a candidate that was run."""
        return statistics.fmean(self.log_objectives[number])


def _log_rate_of(run: ColdRun) -> float | None:
    """Return the ln samples/s of one run; None if the run measured none."""
    return math.log(run.samples_per_s) if run.outcome == "measured" and run.samples_per_s else None


COLD_ERROR = 0.007
"""Chosen, not measured: wanted standard error of a cold run's median, as a share of the median."""
MIN_COLD_STEPS, MAX_COLD_STEPS = 8, 60
"""Chosen, not measured: timed steps of a cold run, at least and at most."""
CONFIRMING_RUNS = 4
"""Cold runs that confirm an answer: the winner and the baseline, A B B A."""
CONFIRMING_SHARE = 0.5
"""Share of the budget that is kept for the runs that confirm."""
TRIALS_SHARE = 1 - CONFIRMING_SHARE
"""Share of the budget that the trials always have."""


class ColdCosts:
    """The cost of cold runs in a search of this state."""

    def __init__(self, state: BestState) -> None:
        self._state = state

    @cached_property
    def steps(self) -> int:
        """Timed steps of each run: enough for `COLD_ERROR`, but confirming takes half of the budget at most."""
        state = self._state
        needed_steps = steps_for(state.measured.step_deviation, COLD_ERROR, MIN_COLD_STEPS, MAX_COLD_STEPS)
        budget_per_run_s = CONFIRMING_SHARE * state.question.budget_s / CONFIRMING_RUNS
        affordable = min(
            (budget_per_run_s - state.start_s(number)) / state.step_s(number) for number in self._confirmed_numbers
        )
        return max(MIN_COLD_STEPS, min(needed_steps, int(affordable)))

    def run_s(self, number: int) -> float:
        """Expected seconds of a cold run of a candidate."""
        return self._state.start_s(number) + self.steps * self._state.step_s(number)

    def are_affordable(self, numbers: Sequence[int]) -> bool:
        """True if the budget pays for one run of every candidate in `numbers`."""
        return self._state.spent_s + sum(map(self.run_s, numbers)) <= self._state.question.budget_s

    def reserve_s(self) -> float:
        """Expected seconds of the runs that confirm: two of the leader and two of the baseline."""
        return 2 * sum(map(self.run_s, self._confirmed_numbers))

    @property
    def _confirmed_numbers(self) -> list[int]:
        """The leader, if there is one, and the baseline."""
        numbers = (self._state.leader_number, self._state.space.baseline_number)
        return [number for number in numbers if number is not None]


NEAR_LOG_GAIN = 0.03
"""Chosen, not measured: candidates within this of the leader, in ln of the objective, take part in the race."""
MAX_FINALISTS = 4
"""Chosen, not measured: the most candidates in the race. Each candidate takes cold runs."""
MIN_FASTEST_CHANCE = 0.01
"""Chosen, not measured: a candidate with a smaller chance than this to be the fastest takes no part."""
EQUAL_LOG_GAIN = 0.005
"""Candidates that differ by less than this, and by less than the noise, are equal: the simpler one wins.

With 0.01 the simpler one was up to 3.2 % off the best."""
NEAR_LIMIT_SHARE = 0.9
"""A candidate that needs more than this share of memory_limit gets a run under the limit."""
EQUAL_MEMORY_SHARE = 0.05
"""Chosen, not measured: memory that exceeds the least by at most this share is the same."""
SPEED_ROLES: tuple[ColdRole, ...] = (RACE, CONFIRM, TURN_BACK)
"""Roles of the cold runs that measure a speed: the real memory_limit slows every step of a CPU run."""


class ColdRanking:
    """The cold runs made so far, and the candidates that they leave as finalists, winner and ties."""

    def __init__(self, state: BestState) -> None:
        self.state = state
        self.baseline_number = state.space.baseline_number
        self.race_runs = MeasuredRuns(state, RACE)
        self.speed_runs = MeasuredRuns(state, *SPEED_ROLES)

    def difference(self, number: int, other_number: int) -> Difference:
        """Return the difference of two candidates: by cold runs if both had some, else by the trials."""
        return self.speed_runs.difference(number, other_number) or self.by_trials(number, other_number)

    def by_trials(self, number: int, other_number: int) -> Difference:
        """Return the difference of two candidates by the trials and the effects alone."""
        gain = self.state.log_gain(number, other_number)
        return Difference(gain.mean, NORMAL_95 * gain.deviation)

    @property
    def has_begun(self) -> bool:
        """True once a cold run was started for its speed: from then on there are no more trials.

        A run under memory_limit does not count: such a run may rule out every measured candidate.
        """
        runs = (line for line in self.state.journal.lines if isinstance(line, BestLaunched | ColdRun))
        return any(run.role in SPEED_ROLES for run in runs)

    @property
    def void_runs(self) -> list[ColdRun]:
        """The cold runs that are void, in their order."""
        return [run for run in self.state.journal.cold_runs if run.outcome == "void"]

    @property
    def run_count(self) -> int:
        """Number of cold runs that are not void."""
        return sum(run.outcome != "void" for run in self.state.journal.cold_runs)

    @cached_property
    def finalists(self) -> list[int]:
        """The leader, and the measured candidates near it that may be as fast, the fastest first."""
        state, leader_number = self.state, self.state.leader_number
        if leader_number is None:
            return []
        gains = [(0.0, leader_number)]
        for number in state.remaining:
            if number == leader_number or number not in state.counted_trials:
                continue
            gain = state.log_gain(number, leader_number)
            if gain.mean > -NEAR_LOG_GAIN and gain.chance_above(0.0) > MIN_FASTEST_CHANCE:
                gains.append((gain.mean, number))
        return [number for _, number in sorted(gains, key=lambda pair: (-pair[0], pair[1]))][:MAX_FINALISTS]

    def count_runs(self, number: int, *roles: ColdRole) -> int:
        """Return the number of runs of a candidate in these roles that are not void."""
        return sum(
            run.candidate_number == number and run.role in roles and run.outcome != "void"
            for run in self.state.journal.cold_runs
        )

    @cached_property
    def contenders(self) -> list[int]:
        """The finalists that are not clearly slower than the fastest in the race."""
        fastest_number = self._fastest_number
        if fastest_number is None:
            return self.finalists
        return [number for number in self.finalists if not self._is_slower(number, fastest_number)]

    @cached_property
    def equally_fast(self) -> list[int]:
        """The contenders that the race cannot tell from the fastest; the leader alone without a race."""
        fastest_number = self._fastest_number
        if fastest_number is None:
            return self.finalists[:1]
        raced_numbers = [number for number in self.contenders if number in self.race_runs.log_objectives]
        return [
            number for number in raced_numbers if number == fastest_number or self._is_equal(number, fastest_number)
        ]

    @property
    def _fastest_number(self) -> int | None:
        raced_numbers = [number for number in self.finalists if number in self.race_runs.log_objectives]
        return max(raced_numbers, key=self.race_runs.mean, default=None)

    def _is_slower(self, number: int, fastest_number: int) -> bool:
        difference = self.race_runs.difference(fastest_number, number)
        return number != fastest_number and difference is not None and difference.is_clear

    def _is_equal(self, number: int, fastest_number: int) -> bool:
        difference = self.race_runs.difference(fastest_number, number)
        return difference is not None and not difference.is_clear and difference.mean < EQUAL_LOG_GAIN

    @cached_property
    def winner_number(self) -> int:
        """The fastest of the race; ties go to less memory, then fewer overridden knobs, then a cheaper start."""
        return min(self.equally_fast, key=self._preference)

    @cached_property
    def answer_number(self) -> int:
        """The winner, or the baseline if that may be the answer and the runs that confirm show no gain over it."""
        winner_number, baseline_number = self.winner_number, self.baseline_number
        gain = self.speed_runs.difference(winner_number, baseline_number)
        if gain is None or winner_number == baseline_number or baseline_number not in self.state.remaining:
            return winner_number
        return winner_number if gain.mean >= EQUAL_LOG_GAIN or (gain.is_clear and gain.mean > 0) else baseline_number

    @cached_property
    def ties(self) -> list[int]:
        """The contenders that the runs cannot tell from the answer."""
        answer_number = self.answer_number
        other_numbers = [number for number in self.contenders if number != answer_number]
        return [number for number in other_numbers if not self.difference(number, answer_number).is_clear]

    def _preference(self, number: int) -> tuple[bool, int, float]:
        return self._needs_more_memory(number), len(self.overridden_knobs(number)), self.state.start_s(number)

    def _needs_more_memory(self, number: int) -> bool:
        """True if a candidate needs more memory than the equally fast one that needs the least."""
        needed_bytes, least_bytes = self.memory_bytes(number), self._least_bytes
        if needed_bytes is None or least_bytes is None:
            return False
        return needed_bytes > least_bytes * (1 + EQUAL_MEMORY_SHARE)

    @cached_property
    def _least_bytes(self) -> int | None:
        """Memory of the equally fast candidate that needs the least; None if no need is known."""
        return lowest(map(self.memory_bytes, self.equally_fast))

    def memory_bytes(self, number: int) -> int | None:
        """Return the measured peak of a candidate, else the predicted one; None without either."""
        state = self.state
        runs = (*state.journal.cold_runs, *state.counted_trials.get(number, ()))
        peaks = [
            run.peak_allocated_bytes for run in runs if run.candidate_number == number and run.peak_allocated_bytes
        ]
        return max(peaks, default=state.candidates[number].predicted_bytes)

    def overridden_knobs(self, number: int) -> list[str]:
        """Return the knobs that differ from the baseline's, without accumulation if the batch decides it."""
        levels = self.state.posterior.levels
        point, base = levels.points[number], levels.points[self.baseline_number]
        return [name for name, level, base_level in zip(levels.names, point, base, strict=True) if level != base_level]

    def without_override(self, number: int, knob: str) -> int | None:
        """Return the candidate with one knob turned back; None if no such candidate remains."""
        levels = self.state.posterior.levels
        base = levels.points[self.baseline_number][levels.names.index(knob)]
        turned_back = levels.with_level(number, knob, base)
        return turned_back if turned_back in self.state.remaining else None

    def is_near_limit(self, number: int) -> bool:
        """True if a candidate needs nearly all of memory_limit, or its need is unknown."""
        limits_bytes = self.state.untested_limits
        needed_bytes = self.memory_bytes(number)
        return bool(limits_bytes) and (needed_bytes is None or needed_bytes > NEAR_LIMIT_SHARE * min(limits_bytes))

    @cached_property
    def unchecked(self) -> list[int]:
        """The measured candidates near memory_limit that had no run under the limit, the fastest first."""
        state = self.state
        measured_numbers = {*state.counted_trials, *self.speed_runs.log_objectives}
        unchecked = [
            number
            for number in state.remaining
            if number in measured_numbers and self.is_near_limit(number) and not self.count_runs(number, UNDER_LIMIT)
        ]
        return sorted(unchecked, key=lambda number: -state.log_objective(number).value)

"""The cold runs of a best-fit search: what they measured, what they cost, and the answer that they leave.

The noise is pooled over repeated runs of the same candidate, with the noise of the trials as four runs' worth of
evidence; intervals are Student's.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from trainfast_runner.errors import lowest
from trainfast_runner.results.distributions import NORMAL_95, student_95
from trainfast_runner.search.best.candidates import log_objective
from trainfast_runner.search.best.state import BestState, LogGains
from trainfast_runner.search.best_journal import CONFIRM, RACE, TURN_BACK, BestLaunched, ColdRole, ColdRun
from trainfast_runner.search.effects import steps_for

PRIOR_RUNS = 4
"""The noise of the trials counts as this many repeated runs."""
COLD_ERROR = 0.007
"""Chosen, not measured: wanted standard error of a cold run's median, as a share of the median."""
MIN_COLD_STEPS, MAX_COLD_STEPS = 8, 60
"""Chosen, not measured: timed steps of a cold run, at least and at most."""
CONFIRMING_RUNS = 4
"""Cold runs that confirm an answer: the winner and the baseline, A B B A."""
CONFIRMING_SHARE = 0.5
"""Share of the budget that is kept for the runs that confirm; the trials always have the rest."""
NEAR_LOG_GAIN = 0.03
"""Chosen, not measured: candidates within this of the leader, in ln of the objective, take part in the race."""
MAX_FINALISTS = 4
"""Chosen, not measured: the most candidates in the race. Each candidate takes cold runs."""
MIN_FASTEST_CHANCE = 0.01
"""Chosen, not measured: a candidate with a smaller chance than this to be the fastest takes no part."""
EQUAL_LOG_GAIN = 0.005
"""Candidates that differ by less than this, and by less than the noise, are equal: the simpler one wins.

With 0.01 the simpler one was up to 3.2 % off the best."""
EQUAL_MEMORY_SHARE = 0.05
"""Chosen, not measured: memory that exceeds the least by at most this share is the same."""
SPEED_ROLES: tuple[ColdRole, ...] = (RACE, CONFIRM, TURN_BACK)
"""Roles of the cold runs that measure a speed: the real memory_limit slows every step of a CPU run."""


@dataclass(frozen=True)
class Difference:
    """The ln of one candidate's objective less another's, and half of its 95 % interval."""

    mean: float
    half_width: float

    @property
    def is_clear(self) -> bool:
        """True if the interval excludes zero."""
        return abs(self.mean) > self.half_width


class ColdRuns:
    """The cold runs of a state: their figures and costs, and the finalists, the winner and the ties that they leave."""

    def __init__(self, state: BestState) -> None:
        self.state = state
        self.baseline_number = state.space.baseline_number
        self._gains: dict[int, LogGains] = {}
        self.counted = [run for run in state.journal.cold_runs if run.outcome != "void"]
        """The cold runs that are not void, in their order."""
        measured = [run for run in self.counted if run.role in SPEED_ROLES and run.outcome == "measured"]
        self.race_figures = self._log_objectives(run for run in measured if run.role == RACE)
        self.figures = self._log_objectives(measured)
        """The ln of the objective in each run that measured a speed, by candidate number."""
        self.log_rates: dict[int, list[float]] = defaultdict(list)
        """The ln samples/s of each such run."""
        for run in measured:
            if run.samples_per_s:
                self.log_rates[run.candidate_number].append(math.log(run.samples_per_s))

    def _log_objectives(self, runs: Iterable[ColdRun]) -> dict[int, list[float]]:
        question, by_candidate = self.state.question, defaultdict(list)
        for run in runs:
            rate = run.samples_per_joule if question.objective == "samples_per_joule" else run.samples_per_s
            if rate:
                candidate = self.state.candidates[run.candidate_number]
                by_candidate[run.candidate_number].append(log_objective(question, candidate, rate, run.start_s))
        return by_candidate

    def half_width(self, figures: Mapping[int, Sequence[float]], runs: float = 1) -> float:
        """Return half of the 95 % interval of the mean of so many runs, by the noise pooled over repeated runs."""
        state = self.state
        squares, freedom = PRIOR_RUNS * (state.posterior.scales.process**2 + COLD_ERROR**2), PRIOR_RUNS
        for values in figures.values():
            if len(values) > 1:
                squares += statistics.variance(values) * (len(values) - 1)
                freedom += len(values) - 1
        return student_95(freedom) * math.sqrt(squares / freedom / runs)

    def difference_in(
        self, figures: Mapping[int, Sequence[float]], number: int, other_number: int
    ) -> Difference | None:
        """Return the difference of two candidates by these figures; None unless both have some."""
        values, others = figures.get(number), figures.get(other_number)
        if not values or not others:
            return None
        runs = 1 / (1 / len(values) + 1 / len(others))
        return Difference(statistics.fmean(values) - statistics.fmean(others), self.half_width(figures, runs))

    def difference(self, number: int, other_number: int) -> Difference:
        """Return the difference of two candidates: by cold runs if both had some, else by the trials."""
        return self.difference_in(self.figures, number, other_number) or self.by_trials(number, other_number)

    def by_trials(self, number: int, other_number: int) -> Difference:
        """Return the difference of two candidates by the trials and the effects alone."""
        gains = self._gains_over(other_number)
        return Difference(float(gains.mean[number]), NORMAL_95 * float(gains.deviation[number]))

    def _gains_over(self, other_number: int) -> LogGains:
        if other_number not in self._gains:
            self._gains[other_number] = self.state.log_gains(other_number)
        return self._gains[other_number]

    @property
    def has_begun(self) -> bool:
        """True once a cold run was started for its speed: from then on there are no more trials.

        A run under memory_limit does not count: such a run may rule out every measured candidate.
        """
        runs = (line for line in self.state.journal.lines if isinstance(line, BestLaunched | ColdRun))
        return any(run.role in SPEED_ROLES for run in runs)

    def count(self, number: int, *roles: ColdRole) -> int:
        """Return the number of runs of a candidate in these roles that are not void."""
        return sum(run.candidate_number == number and run.role in roles for run in self.counted)

    @cached_property
    def finalists(self) -> list[int]:
        """The leader, and the measured candidates near it that may be as fast, the fastest first."""
        state, leader_number = self.state, self.state.leader_number
        if leader_number is None:
            return []
        gains = self._gains_over(leader_number)
        chances = gains.chance_above(0.0)
        near = [
            number
            for number in state.remaining
            if number in state.counted_trials
            and (
                number == leader_number
                or (gains.mean[number] > -NEAR_LOG_GAIN and chances[number] > MIN_FASTEST_CHANCE)
            )
        ]
        return sorted(near, key=lambda number: -gains.mean[number])[:MAX_FINALISTS]

    @cached_property
    def contenders(self) -> list[int]:
        """The finalists that are not clearly slower than the fastest in the race."""
        behind = self._behind_fastest
        return [number for number in self.finalists if number not in behind or not behind[number].is_clear]

    @cached_property
    def _behind_fastest(self) -> dict[int, Difference]:
        """The lead of the fastest in the race over each raced finalist; empty without a race."""
        raced = [number for number in self.finalists if number in self.race_figures]
        fastest = max(raced, key=lambda number: statistics.fmean(self.race_figures[number]), default=None)
        leads = {
            number: self.difference_in(self.race_figures, fastest, number) for number in raced if fastest is not None
        }
        return {number: lead for number, lead in leads.items() if lead is not None}

    @cached_property
    def equally_fast(self) -> list[int]:
        """The contenders that the race cannot tell from the fastest; the leader alone without a race."""
        leads = self._behind_fastest.items()
        return [number for number, lead in leads if not lead.is_clear and lead.mean < EQUAL_LOG_GAIN] or self.finalists[
            :1
        ]

    @cached_property
    def winner_number(self) -> int:
        """The fastest of the race; ties go to less memory, then fewer overridden knobs, then a cheaper start."""
        least_bytes = lowest(map(self.state.journal.memory_bytes, self.equally_fast)) or 0

        def preference(number: int) -> tuple[bool, int, float]:
            needs_more = (self.state.journal.memory_bytes(number) or 0) > least_bytes * (1 + EQUAL_MEMORY_SHARE)
            return needs_more, len(self.overridden_knobs(number)), self.state.start_s(number)

        return min(self.equally_fast, key=preference)

    @cached_property
    def answer_number(self) -> int:
        """The winner, or the baseline if that may be the answer and the runs that confirm show no gain over it."""
        winner_number, baseline_number = self.winner_number, self.baseline_number
        gain = self.difference_in(self.figures, winner_number, baseline_number)
        if gain is None or baseline_number not in self.state.remaining:
            return winner_number
        return winner_number if gain.mean >= EQUAL_LOG_GAIN or (gain.is_clear and gain.mean > 0) else baseline_number

    @cached_property
    def ties(self) -> list[int]:
        """The contenders that the runs cannot tell from the answer."""
        others = [number for number in self.contenders if number != self.answer_number]
        return [number for number in others if not self.difference(number, self.answer_number).is_clear]

    def overridden_knobs(self, number: int) -> list[str]:
        """Return the knobs that differ from the baseline's, without accumulation if the batch decides it."""
        levels = self.state.posterior.levels
        point, base = levels.points[number], levels.points[self.baseline_number]
        return [name for name, level, base_level in zip(levels.names, point, base, strict=True) if level != base_level]

    def without_override(self, number: int, knob: str) -> list[int]:
        """Return the candidate with one knob turned back; empty if no such candidate remains."""
        levels = self.state.posterior.levels
        base = levels.points[self.baseline_number][levels.names.index(knob)]
        turned_back = levels.with_level(number, knob, base)
        return [other for other in self.state.remaining if other == turned_back]

    @cached_property
    def steps(self) -> int:
        """Timed steps of each run: enough for `COLD_ERROR`, but confirming takes half of the budget at most."""
        state = self.state
        needed_steps = steps_for(state.measured.step_deviation, COLD_ERROR, MIN_COLD_STEPS, MAX_COLD_STEPS)
        budget_per_run_s = CONFIRMING_SHARE * state.question.budget_s / CONFIRMING_RUNS
        affordable = min((budget_per_run_s - state.start_s(number)) / state.step_s[number] for number in self._sides)
        return max(MIN_COLD_STEPS, min(needed_steps, int(affordable)))

    def are_affordable(self, numbers: Sequence[int]) -> bool:
        """True if the budget pays for one run of every candidate in `numbers`."""
        return self.state.spent_s + sum(map(self._run_s, numbers)) <= self.state.question.budget_s

    def reserve_s(self) -> float:
        """Expected seconds of the runs that confirm: two of the leader and two of the baseline."""
        return 2 * sum(map(self._run_s, self._sides))

    def _run_s(self, number: int) -> float:
        return self.state.start_s(number) + self.steps * float(self.state.step_s[number])

    @property
    def _sides(self) -> list[int]:
        """The leader, if there is one, and the baseline."""
        return [number for number in (self.state.leader_number, self.baseline_number) if number is not None]

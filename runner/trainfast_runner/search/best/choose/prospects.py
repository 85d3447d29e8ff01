"""The gain that a best-fit search may still expect, and its price: expected improvement a second.

Snoek, Larochelle and Adams, "Practical Bayesian Optimization", 2012.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import NamedTuple

from trainfast_runner.search.best.choose.cold_costs import TRIALS_SHARE, ColdCosts
from trainfast_runner.search.best.choose.state import WORTHWHILE_LOG_GAIN, BestState, state_of_best_journal
from trainfast_runner.search.best.objective import LogGain
from trainfast_runner.search.best.step_rule import ENOUGH_ERROR, MAX_TIMED_STEPS, MIN_TIMED_STEPS, UNTIMED_TRIAL_STEPS
from trainfast_runner.search.speed.process_starts import KnobsKey
from trainfast_runner.search.speed.trial_rates import steps_for

LIKELY_CHANCE = 0.05
"""Trials continue while some candidate has this chance of being 2 % better than the leader."""
COUNTED_CHANCE = 0.01
"""Chosen, not measured: the outlook leaves out candidates with a smaller chance."""


class Outlook(NamedTuple):
    """The chance that further trials find 2 % more, and their seconds."""

    chance: float
    price_s: float


def count_drifted_if_budget_spent(state: BestState) -> BestState:
    """Count the trials of processes that drifted, with the drift as noise, if no time is left to repeat them.

    Returns the state unchanged while there is time.
    """
    if not state.measured.void_run_ids or not Prospects(state, ColdCosts(state)).is_budget_spent:
        return state
    return state_of_best_journal(state.journal.lines, state.spent_s, state.warm_run_id, state, voids_drifted=False)


class Prospects:
    """The expected improvement of each remaining candidate over the leader, its chance and its cost."""

    def __init__(self, state: BestState, costs: ColdCosts) -> None:
        self._state, self._cold_costs = state, costs
        self.leader_number = state.leader_number

    @cached_property
    def open_candidates(self) -> list[int]:
        """Untried candidates that a trial could make the leader; the race, not a second trial, separates equals."""
        state, leader_number = self._state, self.leader_number
        untried = [number for number in state.remaining if number not in state.counted_trials]
        return [number for number in untried if leader_number is None or not state.is_bound(number, leader_number)]

    @cached_property
    def gains(self) -> dict[int, LogGain]:
        """The gain of each open candidate over the leader."""
        if self.leader_number is None:
            return {}
        return self._state.log_gains(self.open_candidates, self.leader_number)

    @cached_property
    def chances(self) -> dict[int, float]:
        """The probability that each open candidate is 2 % better than the leader."""
        return {number: gain.chance_above(WORTHWHILE_LOG_GAIN) for number, gain in self.gains.items()}

    @cached_property
    def likely(self) -> list[int]:
        """Candidates that are likely enough to be 2 % better than the leader."""
        return [number for number, chance in self.chances.items() if chance > LIKELY_CHANCE]

    @cached_property
    def affordable(self) -> set[int]:
        """Open candidates whose trial is expected to end within the time of the trials, its process closed."""
        state, budget_s = self._state, self._state.question.budget_s
        left_s = max(budget_s - self._cold_costs.reserve_s(), TRIALS_SHARE * budget_s) - state.spent_s
        left_if_warm_s = left_s - self._closing_s
        return {
            number
            for number, cost_s in self._costs_s.items()
            if cost_s <= (left_if_warm_s if state.is_warm(number) else left_s)
        }

    @cached_property
    def is_budget_spent(self) -> bool:
        """True if some candidate is worth a trial and the budget pays for none of those."""
        worth = {*self.likely, *self.with_unseen_values}
        return bool(worth) and self.affordable.isdisjoint(worth)

    def improvement_per_s(self, number: int) -> float:
        """Return the expected improvement in ln of the objective, per second of its cost."""
        gain = self.gains[number]
        ratio = gain.mean / gain.deviation
        density = math.exp(-0.5 * ratio * ratio) / math.sqrt(2 * math.pi)
        return (gain.mean * gain.chance_above(0.0) + gain.deviation * density) / self.cost_s(number)

    def cost_s(self, number: int) -> float:
        """Return the expected seconds of a trial: its steps, and the start of a process if it needs a new one."""
        return self._costs_s[number]

    @cached_property
    def _costs_s(self) -> dict[int, float]:
        state, steps = self._state, UNTIMED_TRIAL_STEPS + self.steps
        # A new process also costs a repeat in the process that it replaces. The repeat is counted even if that process
        # repeats nothing, so that fewer processes are started: 12, else 13.
        before_s = {
            process: 0.0 if process == state.warm_process_key else self._closing_s + state.starts.seconds(process)
            for process in set(state.process_keys)
        }
        return {
            number: steps * state.step_s(number) + state.switch_s + before_s[state.process_keys[number]]
            for number in self.open_candidates
        }

    @cached_property
    def _closing_s(self) -> float:
        """Expected seconds of repeating the warm process's first trial, before the search leaves that process."""
        reference = self._state.reference_trial
        return (
            0.0
            if reference is None
            else (UNTIMED_TRIAL_STEPS + self.steps) * self._state.step_s(reference.candidate_number)
        )

    @cached_property
    def steps(self) -> int:
        """Timed steps that bring the standard error of a trial below `ENOUGH_ERROR`."""
        return steps_for(self._state.measured.step_deviation, ENOUGH_ERROR, MIN_TIMED_STEPS, MAX_TIMED_STEPS)

    @cached_property
    def with_unseen_values(self) -> list[int]:
        """Open candidates with values of knobs that were never run."""
        state = self._state
        points = state.posterior.levels.points
        # A value that failed or did not fit was run, too.
        tried_numbers = {
            trial.candidate_number
            for trial in state.journal.trials
            if trial.outcome != "void" and trial.run_id not in state.measured.void_run_ids
        }
        if not tried_numbers:
            return self.open_candidates
        seen_levels = [set(levels) for levels in zip(*(points[number] for number in tried_numbers), strict=True)]
        columns = state.posterior.levels.columns
        unfinished = [index for index, levels in enumerate(seen_levels) if not levels.issuperset(columns[index])]
        return [
            number
            for number in self.open_candidates
            if any(points[number][index] not in seen_levels[index] for index in unfinished)
        ]

    @cached_property
    def outlook(self) -> Outlook:
        """The chance that further trials find 2 % more, and their price.

        Candidates that share a process have much in common: the best candidate of each process counts, independently.
        """
        best_of_process: dict[KnobsKey, int] = {}
        counted = [number for number, chance in self.chances.items() if chance > COUNTED_CHANCE]
        for number in sorted(counted, key=lambda number: -self.chances[number]):
            best_of_process.setdefault(self._state.process_keys[number], number)
        no_gain_chance = math.prod(1 - self.chances[number] for number in best_of_process.values())
        return Outlook(1 - no_gain_chance, sum(self.cost_s(number) for number in best_of_process.values()))

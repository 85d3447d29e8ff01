"""The steps and the expected seconds of cold runs, and the share of the budget that is kept for them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from trainfast_runner.search.best.choose.state import BestState
from trainfast_runner.search.speed.trial_rates import steps_for

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

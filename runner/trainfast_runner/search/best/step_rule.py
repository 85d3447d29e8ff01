"""The steps of a trial of a best fit: untimed ones, then timed ones until the error of their median is small."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from trainfast_runner.search.speed.trial_rates import relative_error

UNTIMED_TRIAL_STEPS = 2
"""Steps before a trial's timed ones: from the second on the optimizer has states, and a CPU's memory is measured."""
MIN_TIMED_STEPS, MAX_TIMED_STEPS, ENOUGH_ERROR = 4, 25, 0.012
"""Timed steps of a trial, and the standard error that is enough."""
MIN_TRIAL_STEPS = UNTIMED_TRIAL_STEPS + MIN_TIMED_STEPS
"""Steps of the shortest trial."""
Judgement = Literal["more", "enough", "slow"]
"""`more` steps are needed, `enough` were taken, or the candidate is too `slow`."""


@dataclass(frozen=True)
class StepRule:
    """The number of timed steps of a trial: from `min_steps` to `max_steps`, as many as their scatter needs."""

    min_steps: int = MIN_TIMED_STEPS
    max_steps: int = MAX_TIMED_STEPS
    standard_error: float = ENOUGH_ERROR
    """The standard error of the median that is enough, as a share of the median."""
    give_up_ms: float | None = None
    """A trial whose best step is slower than this ends; None for no bound."""

    def judge(self, step_ms: Sequence[float]) -> Judgement:
        """Judge a trial by the times of its steps so far, in ms."""
        if self.give_up_ms is not None and len(step_ms) >= 2 and min(step_ms) > self.give_up_ms:
            return "slow"
        if len(step_ms) < self.min_steps:
            return "more"
        return "enough" if len(step_ms) >= self.max_steps or relative_error(step_ms) <= self.standard_error else "more"


ORDINARY_RULE = StepRule()
"""The rule of a trial that is never given up."""

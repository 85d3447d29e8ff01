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

from trainfast_runner.results.distributions import student_95
from trainfast_runner.search.best.choose.cold_costs import COLD_ERROR
from trainfast_runner.search.best.choose.state import BestState
from trainfast_runner.search.best.objective import log_objective
from trainfast_runner.search.journal.best import ColdRole, ColdRun

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

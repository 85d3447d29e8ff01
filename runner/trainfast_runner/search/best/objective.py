"""The objective of a best-fit search (`--objective`, not the training objective of `[data]`), and its ln."""

from __future__ import annotations

import math
from typing import NamedTuple

from trainfast_runner.search.journal.best import BestQuestion, Candidate, Interval
from trainfast_runner.settings.knob_type import whole_number


class LogObjective(NamedTuple):
    """The ln of an objective, negated for `time`: higher is better."""

    value: float
    slope: float
    """Derivative of the value by the ln rate."""


class LogGain(NamedTuple):
    """The predicted ln of one candidate's objective over another's: a normal distribution.

    The difference that cold runs measured is a `cold_runs.Difference`.
    """

    mean: float
    deviation: float

    def chance_above(self, log_gain: float) -> float:
        """Return the probability that the gain exceeds `log_gain`."""
        return 0.5 * math.erfc((log_gain - self.mean) / self.deviation / math.sqrt(2))


def log_objective(question: BestQuestion, candidate: Candidate, log_rate: float, start_s: float) -> LogObjective:
    """Return the ln of the objective at the ln of a rate, with the units of `objective_at`.

    For `time`, T = start + steps x samples / rate: d(-ln T) / d(ln rate) = (T - start) / T.
    """
    if question.objective == "tokens_per_s":
        return LogObjective(log_rate + math.log(seq_len_of(question, candidate)), 1.0)
    if question.objective == "time":
        work_s = (question.for_steps or 1) * candidate.samples_per_step / math.exp(log_rate)
        return LogObjective(-math.log(start_s + work_s), work_s / (start_s + work_s))
    return LogObjective(log_rate, 1.0)


def objective_at(question: BestQuestion, candidate: Candidate, rate: float, start_s: float) -> float:
    """Return tokens/s, seconds of a start and `for_steps` optimizer steps, or the rate itself.

    `rate` is in samples/s, or in samples/J if that is the objective; `start_s` is the time to the first timed step.
    """
    if question.objective == "tokens_per_s":
        return rate * seq_len_of(question, candidate)
    if question.objective == "time":
        return start_s + (question.for_steps or 1) * candidate.samples_per_step / rate
    return rate


def objective_interval(question: BestQuestion, candidate: Candidate, rate: Interval, start_s: float) -> Interval:
    """Return the objective of a rate that is known within an interval; the longest time belongs to the lowest rate."""
    low, median, high = (
        objective_at(question, candidate, value, start_s) for value in (rate.low, rate.median, rate.high)
    )
    return Interval(median=median, low=min(low, high), high=max(low, high))


def seq_len_of(question: BestQuestion, candidate: Candidate) -> int:
    """Return the tokens of a sample of this candidate."""
    return whole_number({"seq_len": 1, **question.knobs, **candidate.knobs}, "seq_len")

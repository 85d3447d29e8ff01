"""The objectives of a best-fit search in words, and its figures in their units: a rate, or the time of a training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainfast_tui.text import format as fmt

if TYPE_CHECKING:
    from trainfast_runner.search.journal.best import Interval


@dataclass(frozen=True, slots=True)
class Objective:
    """An objective in words; the figures of `time` have no unit here but the one of their size."""

    unit: str
    judged_by: str
    """The figure that a report says it judges by."""
    best: str
    """The end of the question: which settings train the model best?"""
    hint: str
    """The line of the dialog that asks for the objective."""


OBJECTIVES = {
    "samples_per_s": Objective("samples/s", "samples/s", "fastest", "the most samples a second"),
    "tokens_per_s": Objective(
        "tokens/s",
        "tokens/s",
        "fastest by tokens",
        "the most tokens a second, which compares values of seq_len as well",
    ),
    "samples_per_joule": Objective(
        "samples/J",
        "samples a joule",
        "with the least energy a sample",
        "the most samples a joule; needs a GPU with an energy counter",
    ),
    "time": Objective(
        "",
        "the time of a cold start and the steps",
        "to the last step in the least time",
        "the least time for a start and a number of steps",
    ),
}
"""The words of each objective by its name."""
TIME_UNITS = ((7200.0, 3600.0, "h"), (120.0, 60.0, "min"), (0.0, 1.0, "s"))
"""Least seconds, seconds of the unit and its name, the largest unit first."""


def objective_of(name: str) -> Objective:
    """Return the words of an objective; of one of a newer version its name."""
    return OBJECTIVES.get(name, Objective(name, name, f"best by {name}", name))


def unit_of(objective: str, median: float) -> tuple[str, float]:
    """Return the unit in which a figure of this size is shown, and what to divide the figure by."""
    if objective != "time":
        return objective_of(objective).unit, 1.0
    return next((name, each_s) for from_s, each_s, name in TIME_UNITS if median >= from_s)


def objective_words(objective: str, for_steps: int | None, value: Interval) -> str:
    """Return a figure with its 95 % interval: `123 tokens/s (120 to 126)`, `12.3 min (12.1 to 12.5) for 800 steps`."""
    unit, each = unit_of(objective, value.median)
    words = figure_words(value, each, f" {unit}")
    return words if for_steps is None else f"{words} for {fmt.count(for_steps, 'steps')}"


def figure_words(value: Interval, each: float, unit: str = "") -> str:
    """Return a figure divided by `each`, with its interval if it has one: `123 (120 to 126)`."""
    words = f"{fmt.number(value.median / each)}{unit}"
    if value.low == value.high:
        return words
    return f"{words} ({fmt.interval(value.low / each, value.high / each)})"

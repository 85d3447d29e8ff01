"""The figure that a best-fit search compares, in its unit: a rate, or the time of a whole training."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainfast_tui.text import format as fmt

if TYPE_CHECKING:
    from trainfast_runner.search.journal.best import Interval

UNITS = {"samples_per_s": "samples/s", "tokens_per_s": "tokens/s", "samples_per_joule": "samples/J"}
"""The unit of each objective that is a rate; a time is in seconds."""
TIME_UNITS = ((7200.0, 3600.0, "h"), (120.0, 60.0, "min"), (0.0, 1.0, "s"))
"""Least seconds, seconds of the unit and its name, the largest unit first."""


def unit_of(objective: str, median: float) -> tuple[str, float]:
    """Return the unit in which a figure of this size is shown, and what to divide the figure by."""
    if objective != "time":
        return UNITS.get(objective, objective), 1.0
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
    return f"{words} ({fmt.number(value.low / each)} to {fmt.number(value.high / each)})"

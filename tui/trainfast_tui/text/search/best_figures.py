"""The figures of a best-fit search in words: knobs, rates, gains, noise, counts of verdicts, and its objectives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainfast_runner.units import counted
from trainfast_tui.text import format as fmt
from trainfast_tui.text.overrides import typed_overrides

if TYPE_CHECKING:
    from trainfast_runner.search.journal.best import BestAnswer, Interval

VERDICTS = ("measured", "beaten", "bound", "too_large", "incompatible", "failed", "not_tried")


@dataclass(frozen=True, slots=True)
class Objective:
    """Words of an objective. `unit` is empty for `time`, whose unit depends on the figure (`unit_of`)."""

    unit: str
    judged_by: str
    """The criterion that a report names."""
    best: str
    """Completes: which settings train the model ...?"""
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


def typed_knobs(knobs: Mapping[str, Any]) -> str:
    """Return the knobs as they are typed: `batch_size=8 precision=bf16`."""
    return " ".join(typed_overrides(knobs))


def rate_text(rate: Interval | None) -> str:
    """Return a rate with its 95 % interval: `123 samples/s (120 to 126)`."""
    if rate is None:
        return fmt.ABSENT
    return f"{fmt.per_second(rate.median, 'samples')} ({fmt.interval(rate.low, rate.high)})"


def gain_text(percent: Interval | None) -> str:
    """Return a gain with its 95 % interval: `+34.1 % (+31.0 % to +37.2 %)`."""
    if percent is None:
        return "unknown"
    low, high = fmt.signed_percent(percent.low), fmt.signed_percent(percent.high)
    return f"{fmt.signed_percent(percent.median)} ({low} to {high})"


def is_final(answer: BestAnswer | None, state: str) -> bool:
    """True if the search has ended with its answer, and not because its budget was spent."""
    return state == "answered" and (answer is None or answer.tried_in_budget is None)


def best_label(answer: BestAnswer | None, state: str) -> str:
    """Return the label of the best setting: `best so far`, or `chosen` where the noise decides against a winner."""
    label = "best" if answer is None or answer.within_percent is None else "chosen"
    return label if is_final(answer, state) else f"{label} so far"


def noise_words(percent: float) -> str:
    """Return the noise that decides instead of a winner: `within 8.0 %, the noise of this machine`."""
    return f"within {fmt.percent(percent, 1)}, the noise of this machine"


def budget_words(tried: int, candidates: int) -> str:
    """Return the number of candidates tried within the budget: `2 of 28 tried when the budget ended`."""
    return f"{tried:,} of {candidates:,} tried when the budget ended"


def verdict_counts(verdicts: Iterable[str]) -> str:
    """Return the number of each verdict in words: `12 measured, 17 beaten`."""
    counts = Counter(verdicts)
    return ", ".join(f"{counts[name]:,} {name.replace('_', ' ')}" for name in VERDICTS if counts[name])


def objective_of(name: str) -> Objective:
    """Return the words of an objective; an unknown one is named by itself."""
    return OBJECTIVES.get(name, Objective(name, name, f"best by {name}", name))


def unit_of(objective: str, median: float) -> tuple[str, float]:
    """Return the unit in which a figure of this size is shown, and the divisor of the figure."""
    if objective != "time":
        return objective_of(objective).unit, 1.0
    return next((name, divisor_s) for from_s, divisor_s, name in TIME_UNITS if median >= from_s)


def objective_words(objective: str, for_steps: int | None, value: Interval) -> str:
    """Return a figure with its 95 % interval: `123 tokens/s (120 to 126)`, `12.3 min (12.1 to 12.5) for 800 steps`."""
    unit, divisor = unit_of(objective, value.median)
    words = figure_with_interval_text(value, divisor, f" {unit}")
    return words if for_steps is None else f"{words} for {counted(for_steps, 'step')}"


def figure_with_interval_text(value: Interval, divisor: float, unit: str = "") -> str:
    """Return a figure divided by `divisor`, with its interval if it has one: `123 (120 to 126)`."""
    words = f"{fmt.number(value.median / divisor)}{unit}"
    if value.low == value.high:
        return words
    return f"{words} ({fmt.interval(value.low / divisor, value.high / divisor)})"

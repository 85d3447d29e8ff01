"""The words for the knobs and the figures of a best-fit search: rates, gains, noise, and counts of verdicts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from trainfast_tui.text import format as fmt
from trainfast_tui.text.comparison import setting_text

if TYPE_CHECKING:
    from trainfast_runner.search.journal.best import Interval

VERDICTS = ("measured", "beaten", "bound", "too_large", "incompatible", "failed", "not_tried")


def knob_words(knobs: Mapping[str, Any]) -> str:
    """Knobs as they are typed: `batch_size=8 precision=bf16`."""
    return " ".join(f"{name}={setting_text(name, value)}" for name, value in knobs.items())


def rate_words(rate: Interval | None) -> str:
    """A rate with its 95 % interval: `123 samples/s (120 to 126)`."""
    if rate is None:
        return fmt.ABSENT
    return f"{fmt.per_second(rate.median, 'samples')} ({fmt.interval(rate.low, rate.high)})"


def gain_words(percent: Interval | None) -> str:
    """A gain with its 95 % interval: `+34.1 % (+31.0 % to +37.2 %)`."""
    if percent is None:
        return "unknown"
    low, high = fmt.signed_percent(percent.low), fmt.signed_percent(percent.high)
    return f"{fmt.signed_percent(percent.median)} ({low} to {high})"


def noise_words(percent: float) -> str:
    """The noise that decides instead of a winner: `within 8.0 %, the noise of this machine`."""
    return f"within {fmt.percent(percent, 1)}, the noise of this machine"


def budget_words(tried: int, candidates: int) -> str:
    """Return the number of candidates tried within the budget: `2 of 28 tried when the budget ended`."""
    return f"{tried:,} of {candidates:,} tried when the budget ended"


def measurements(number: int) -> str:
    """`1 measurement`, `12 measurements`."""
    return f"{number:,} measurement{'' if number == 1 else 's'}"


def count_words(verdicts: Iterable[str]) -> str:
    """The number of each verdict: `12 measured, 17 beaten`."""
    counts = Counter(verdicts)
    return ", ".join(f"{counts[name]:,} {name.replace('_', ' ')}" for name in VERDICTS if counts[name])

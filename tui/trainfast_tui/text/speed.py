"""A predicted speed in words, and beside what was measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainfast_tui.text.format import number, plain, signed_percent

if TYPE_CHECKING:
    from trainfast_runner.records.run_file import PredictedSpeed


def speed_words(speed: PredictedSpeed) -> str:
    """A rate and its 90 % interval: `14.2 samples/s (12.9 to 15.6)`."""
    return f"{number(speed.median)} samples/s ({number(speed.low)} to {number(speed.high)})"


def against_predicted_speed(measured: float | None, speed: PredictedSpeed) -> str:
    """The prediction and the difference of what was measured: `predicted 14.2 samples/s (12.9 to 15.6), +3.1 %`."""
    words = f"predicted {speed_words(speed)}"
    if measured is None or not speed.median:
        return plain(words)
    return plain(f"{words}, {signed_percent(100 * (measured / speed.median - 1))}")

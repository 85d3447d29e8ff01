"""Speeds in words: a predicted one, alone and beside the measured one, and the remark on one of few steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainfast_runner.records.result import MIN_STEPS_TO_COMPARE
from trainfast_tui.text.format import interval, number, percent_change, plain, signed_percent

if TYPE_CHECKING:
    from trainfast_runner.records.run_file import PredictedSpeed

SAMPLES_VARY = "mean: steps differ in size"
"""The remark on a rate of steps that differ in size."""


def speed_text(speed: PredictedSpeed) -> str:
    """Return a rate and its 90 % interval: `14.2 samples/s (12.9 to 15.6)`."""
    return f"{number(speed.median)} samples/s ({interval(speed.low, speed.high)})"


def few_steps_note(measured: int) -> str:
    """Return the remark on a speed of so few steps; empty if no step or enough steps were measured."""
    if not 0 < measured < MIN_STEPS_TO_COMPARE:
        return ""
    return "1 timed step" if measured == 1 else "few steps"


def against_predicted_speed(measured: float | None, speed: PredictedSpeed) -> str:
    """Return the prediction and its error: `predicted 14.2 samples/s (12.9 to 15.6), +3.1 %`."""
    words = f"predicted {speed_text(speed)}"
    if measured is None or not speed.median:
        return plain(words)
    return plain(f"{words}, {signed_percent(percent_change(measured, speed.median))}")

"""The speed of the next run: the predicted samples/s with its interval, its change, and the last measured speed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainfast_tui.next_run.memory_and_speed import MeasuredSpeed, NextRunSpeed
from trainfast_tui.painting.painted import GrowingPanel
from trainfast_tui.text import format as fmt
from trainfast_tui.text.lines import Line, Piece, Tone, first_fitting, join_pieces, paragraph, rule
from trainfast_tui.text.speed_words import speed_text
from trainfast_tui.widgets.bar import MEASURED_SIGN, has_long_form

if TYPE_CHECKING:
    from trainfast_runner.records.run_file import PredictedSpeed

BELOW_INTERVAL, INSIDE_INTERVAL = "█", "▒"
"""Cells below the interval's lower end, and inside of the interval."""
REFERENCE_SIGN = "┃"
"""The sign of the speed before knobs were turned."""


class SpeedBar(GrowingPanel):
    """The bar of samples/s; hidden while nothing is known of the next run's speed."""

    def __init__(self) -> None:
        super().__init__()
        self._speed: NextRunSpeed | None = None

    def show_speed(self, speed: NextRunSpeed | None) -> None:
        """Show this speed; None hides the panel."""
        if speed == self._speed:
            return
        self._speed = speed
        self.set_shown(speed is not None)

    def lines(self, width: int, height: int) -> list[Line]:
        speed = self._speed
        if speed is None or width <= 0:
            return []
        return speed_lines(speed, width, self.screen.size.height)


def speed_lines(speed: NextRunSpeed, width: int, screen_height: int) -> list[Line]:
    """Return the bar in lines of `width` cells, with its title if width and height allow."""
    long_form = has_long_form(width, screen_height)
    lines = [rule("speed", width)] if long_form else []
    if speed.predicted is None:
        lines += paragraph(f"no speed predicted: {speed.reason}", width, "muted", 2) if speed.reason else []
    else:
        lines += [_bar_line(speed, speed.predicted, width), *_predicted_lines(speed, speed.predicted, width, long_form)]
    if speed.measured is not None:
        lines += _measured_lines(speed, speed.measured, width) if long_form else [_measured_line(speed.measured, width)]
    return lines


def _predicted_lines(speed: NextRunSpeed, predicted: PredictedSpeed, width: int, long_form: bool) -> list[Line]:
    """Return the prediction with its interval and its change from the run on the screen, or from the preset.

    In the short form the change stands alone.
    """
    change_percent = speed.change_percent
    words: Piece = (speed_text(predicted), "title")
    interval = first_fitting([[("predicted ", "muted"), words], [words]], width)
    if change_percent is None:
        return [interval]
    change = f"{fmt.signed_percent(change_percent)} from {fmt.number(speed.reference_samples_per_s)}"
    tone: Tone = "success" if change_percent >= 0 else "warning"
    if long_form:
        return [interval, [("change: ", "muted"), (f"{change} samples/s", tone)]]
    start: Line = [(f"{fmt.number(predicted.median)}/s, ", "title")]
    short = fmt.signed_percent(change_percent)
    return [first_fitting([[*start, (f"{change}/s", tone)], [*start, (change, tone)], [*start, (short, tone)]], width)]


def _bar_line(speed: NextRunSpeed, predicted: PredictedSpeed, width: int) -> Line:
    """Return the interval on the scale of all figures shown; a sign marks the prediction before knobs were turned."""
    scale = width / _full_width_samples_per_s(speed)
    low, high = max(1, round(predicted.low * scale)), round(predicted.high * scale)
    line: Line = [(BELOW_INTERVAL, "primary") for _ in range(low)]
    line += [(INSIDE_INTERVAL, "primary") for _ in range(high - low)]
    line += [("·", "muted")] * (width - len(line))
    if speed.reference_samples_per_s is not None:
        line[min(width - 1, round(speed.reference_samples_per_s * scale))] = (REFERENCE_SIGN, "accent")
    return join_pieces(line[:width])


def _full_width_samples_per_s(speed: NextRunSpeed) -> float:
    """Return the samples/s of the whole width."""
    predicted = speed.predicted.high if speed.predicted is not None else 0.0
    measured = speed.measured.samples_per_s if speed.measured is not None else 0.0
    return max(predicted, measured, speed.reference_samples_per_s or 0.0, 1e-9)


def _measured_lines(speed: NextRunSpeed, measured: MeasuredSpeed, width: int) -> list[Line]:
    """Return the measured speed on the same scale, and beside it the speed predicted for its run."""
    filled = max(1, min(width, round(measured.samples_per_s / _full_width_samples_per_s(speed) * width)))
    return [[(MEASURED_SIGN * filled, "title")], _measured_line(measured, width)]


def _measured_line(measured: MeasuredSpeed, width: int) -> Line:
    rate, predicted = fmt.number(measured.samples_per_s), measured.predicted
    start: Line = [("measured ", "muted"), (f"{rate} samples/s", "title")]
    if predicted is None or not predicted.median:
        return start
    predicted_rate = fmt.number(predicted.median)
    difference = fmt.signed_percent(fmt.percent_change(measured.samples_per_s, predicted.median))
    return first_fitting(
        [
            [*start, (f" (predicted {predicted_rate}, {difference})", "text")],
            [*start[:1], (f"{rate}/s", "title"), (f" (predicted {predicted_rate}/s, {difference})", "text")],
            [("ran ", "muted"), (f"{rate}/s", "title"), (f", predicted {predicted_rate}/s", "text")],
            [(f"{rate}/s", "title"), (f", predicted {predicted_rate}/s", "text")],
        ],
        width,
    )

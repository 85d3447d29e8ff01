"""The speed of the next run: the predicted samples/s with its interval, its change, and the last measured speed."""

from __future__ import annotations

from trainfast_tui.control.next_run_speed import MeasuredSpeed, NextRunSpeed
from trainfast_tui.painting.painted import GrowingPanel
from trainfast_tui.text import format as fmt
from trainfast_tui.text.lines import Line, Piece, Tone, first_fitting, joined, paragraph, rule
from trainfast_tui.text.speed import speed_words
from trainfast_tui.widgets.memory_bar import MEASURED, ROOMY, TALL

SURE, UNSURE = "█", "▒"
"""Cells below the interval's lower end, and inside of the interval."""


class SpeedBar(GrowingPanel):
    """The bar of samples/s; hidden while nothing is known of the next run's speed."""

    def __init__(self) -> None:
        super().__init__()
        self._view: NextRunSpeed | None = None

    def show_speed(self, view: NextRunSpeed | None) -> None:
        """Show this view; None hides the panel."""
        if view == self._view:
            return
        self._view = view
        self.set_shown(view is not None)

    def lines(self, width: int, height: int) -> list[Line]:
        view = self._view
        if view is None or width <= 0:
            return []
        return speed_lines(view, width, self.screen.size.height)


def speed_lines(view: NextRunSpeed, width: int, screen_height: int) -> list[Line]:
    """Return the bar in lines of `width` cells, with its title if width and height allow."""
    roomy = width >= ROOMY and screen_height >= TALL
    lines = [rule("speed", width)] if roomy else []
    if view.predicted is None:
        lines += paragraph(f"no speed predicted: {view.why}", width, "muted", 2) if view.why else []
    else:
        lines += [_bar(view, width), *_predicted(view, width, roomy)]
    if view.measured is not None:
        lines += _measured(view, view.measured, width) if roomy else [_measured_words(view.measured, width)]
    return lines


def _predicted(view: NextRunSpeed, width: int, roomy: bool) -> list[Line]:
    """Return the prediction with its interval, and its change by the turned knobs, in place of it without room."""
    speed, change_percent = view.predicted, view.change_percent
    assert speed is not None
    words: Piece = (speed_words(speed), "title")
    interval = first_fitting([[("predicted ", "muted"), words], [words]], width)
    if change_percent is None:
        return [interval]
    change = f"{fmt.signed_percent(change_percent)} from {fmt.number(view.reference)}"
    tone: Tone = "success" if change_percent >= 0 else "warning"
    if roomy:
        return [interval, [("overrides: ", "muted"), (f"{change} samples/s", tone)]]
    alone: Line = [(f"{fmt.number(speed.median)}/s, ", "title")]
    short = fmt.signed_percent(change_percent)
    return [first_fitting([[*alone, (f"{change}/s", tone)], [*alone, (change, tone)], [*alone, (short, tone)]], width)]


def _bar(view: NextRunSpeed, width: int) -> Line:
    """Return the interval on the scale of all figures shown; a sign marks the prediction before knobs were turned."""
    speed = view.predicted
    assert speed is not None
    scale = width / _most(view)
    low, high = max(1, round(speed.low * scale)), round(speed.high * scale)
    painted: Line = [(SURE, "primary") for _ in range(low)]
    painted += [(UNSURE, "primary") for _ in range(high - low)]
    painted += [("·", "muted")] * (width - len(painted))
    if view.reference is not None:
        painted[min(width - 1, round(view.reference * scale))] = ("┃", "accent")
    return joined(painted[:width])


def _most(view: NextRunSpeed) -> float:
    """Return the samples/s of the whole width."""
    predicted = view.predicted.high if view.predicted is not None else 0.0
    measured = view.measured.samples_per_s if view.measured is not None else 0.0
    return max(predicted, measured, view.reference or 0.0, 1e-9)


def _measured(view: NextRunSpeed, measured: MeasuredSpeed, width: int) -> list[Line]:
    """Return the measured speed on the same scale, and beside it the speed predicted for its run."""
    filled = max(1, min(width, round(measured.samples_per_s / _most(view) * width)))
    return [[(MEASURED * filled, "title")], _measured_words(measured, width)]


def _measured_words(measured: MeasuredSpeed, width: int) -> Line:
    rate, predicted = fmt.number(measured.samples_per_s), measured.predicted
    alone: Line = [("measured ", "muted"), (f"{rate} samples/s", "title")]
    if predicted is None or not predicted.median:
        return alone
    expected = fmt.number(predicted.median)
    difference = fmt.signed_percent(100 * (measured.samples_per_s / predicted.median - 1))
    return first_fitting(
        [
            [*alone, (f" (predicted {expected}, {difference})", "text")],
            [*alone[:1], (f"{rate}/s", "title"), (f" (predicted {expected}/s, {difference})", "text")],
            [("ran ", "muted"), (f"{rate}/s", "title"), (f", predicted {expected}/s", "text")],
            [(f"{rate}/s", "title"), (f", predicted {expected}/s", "text")],
        ],
        width,
    )

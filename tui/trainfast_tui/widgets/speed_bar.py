"""The speed of the next run: the predicted samples/s with its interval, its change, and the last measured speed."""

from __future__ import annotations

from trainfast_tui.charts.painted import GrowingPanel
from trainfast_tui.control.speed_view import MeasuredSpeed, SpeedView
from trainfast_tui.text import format as fmt
from trainfast_tui.text.lines import Line, joined, line_length, paragraph, rule
from trainfast_tui.text.speed import speed_words
from trainfast_tui.widgets.memory_bar import MEASURED, ROOMY, TALL

SURE, UNSURE = "█", "▒"
"""Cells below the interval's lower end, and inside of the interval."""


class SpeedBar(GrowingPanel):
    """The bar of samples/s; hidden while nothing is known of the next run's speed."""

    def __init__(self) -> None:
        super().__init__()
        self._view: SpeedView | None = None

    def show(self, view: SpeedView | None) -> None:
        """Show this view; None hides the panel."""
        if view == self._view:
            return
        before = self._height()
        self._view = view
        if self._height() != before or self.has_class("-shown") != (view is not None):
            self.set_shown(view is not None)
        else:
            self.repaint()

    def lines(self, width: int, height: int) -> list[Line]:
        view = self._view
        if view is None or width <= 0:
            return []
        return speed_lines(view, width, self.screen.size.height)

    def _height(self) -> int:
        width = self.size.width
        return len(self.lines(width, 100)) if width else -1


def speed_lines(view: SpeedView, width: int, screen_height: int) -> list[Line]:
    """Return the bar in lines of `width` cells, with its title if width and height allow."""
    roomy = width >= ROOMY and screen_height >= TALL
    lines = [rule("speed", width)] if roomy else []
    if view.predicted is None:
        lines += paragraph(f"no speed predicted: {view.why}", width, "muted", 2) if view.why else []
    else:
        lines += [_bar(view, width), _predicted(view, width)]
    if view.measured is not None:
        lines += _measured(view, view.measured, width) if roomy else [_measured_words(view.measured, width)]
    return lines


def _predicted(view: SpeedView, width: int) -> Line:
    """Return the prediction in words, and the change by the turned knobs."""
    assert view.predicted is not None
    line: Line = [(speed_words(view.predicted), "title")]
    if view.change_percent is not None:
        change = fmt.signed_percent(view.change_percent)
        line.append((f" {change}", "success" if view.change_percent >= 0 else "warning"))
    label: Line = [("predicted ", "muted")]
    return [*label, *line] if line_length([*label, *line]) <= width else line


def _bar(view: SpeedView, width: int) -> Line:
    """Return the interval on the scale of all figures shown; a sign marks the prediction before knobs were turned."""
    speed = view.predicted
    assert speed is not None
    scale = width / _most(view)
    low, high = max(1, round(speed.low * scale)), round(speed.high * scale)
    painted: Line = [(SURE, "primary") for _ in range(low)]
    painted += [(UNSURE, "primary") for _ in range(high - low)]
    painted += [("·", "muted")] * (width - len(painted))
    if view.before is not None:
        painted[min(width - 1, round(view.before * scale))] = ("┃", "accent")
    return joined(painted[:width])


def _most(view: SpeedView) -> float:
    """Return the samples/s of the whole width."""
    predicted = view.predicted.high if view.predicted is not None else 0.0
    measured = view.measured.samples_per_s if view.measured is not None else 0.0
    return max(predicted, measured, view.before or 0.0, 1e-9)


def _measured(view: SpeedView, measured: MeasuredSpeed, width: int) -> list[Line]:
    """Return the measured speed on the same scale, and its difference to its run's prediction."""
    filled = max(1, min(width, round(measured.samples_per_s / _most(view) * width)))
    return [[(MEASURED * filled, "title")], _measured_words(measured, width)]


def _measured_words(measured: MeasuredSpeed, width: int) -> Line:
    rate = fmt.number(measured.samples_per_s)
    alone: Line = [("measured ", "muted"), (f"{rate} samples/s", "title")]
    if measured.predicted is None or not measured.predicted.median:
        return alone
    expected = measured.predicted.median
    difference = f", {fmt.signed_percent(100 * (measured.samples_per_s / expected - 1))}"
    beside: Line = [*alone, (difference, "text")]
    short: Line = [("measured ", "muted"), (f"{rate}/s", "title"), (difference, "text")]
    whole: Line = [*beside, (f" of its {fmt.number(expected)}", "muted")]
    return next((line for line in (whole, beside, short) if line_length(line) <= width), alone)

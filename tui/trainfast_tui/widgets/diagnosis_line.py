"""The run's worst bottleneck in one line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainfast_tui.painting.painted import PaintedValue
from trainfast_tui.text.diagnosis import worst_bottleneck_line
from trainfast_tui.text.lines import Line

if TYPE_CHECKING:
    from trainfast_runner.running.follower import RunSnapshot


class DiagnosisLine(PaintedValue["RunSnapshot"]):
    """The worst bottleneck in one line; hidden before the first step."""

    DEFAULT_CSS = """
    DiagnosisLine { height: 1; display: none; }
    DiagnosisLine.-shown { display: block; }
    """

    def show_value(self, value: RunSnapshot | None) -> None:
        """Show this run's worst bottleneck."""
        self.set_class(value is not None and bool(value.steps), "-shown")
        super().show_value(value)

    def lines(self, width: int, height: int) -> list[Line]:
        return [] if self.shown is None else [worst_bottleneck_line(self.shown)]

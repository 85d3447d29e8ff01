"""The run's worst bottleneck in one line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainfast_tui.charts.painted import Painted
from trainfast_tui.text.diagnosis import one_line
from trainfast_tui.text.lines import Line

if TYPE_CHECKING:
    from trainfast_runner.running.follower import RunSnapshot


class DiagnosisLine(Painted):
    """Hidden until the run has made a step."""

    DEFAULT_CSS = """
    DiagnosisLine { height: 1; display: none; }
    DiagnosisLine.-shown { display: block; }
    """

    def __init__(self) -> None:
        super().__init__()
        self._run: RunSnapshot | None = None

    def show(self, run: RunSnapshot | None) -> None:
        """Show this run's worst bottleneck."""
        self._run = run
        self.set_class(run is not None and bool(run.steps), "-shown")
        self.repaint()

    def lines(self, width: int, height: int) -> list[Line]:
        return [] if self._run is None else [one_line(self._run)]

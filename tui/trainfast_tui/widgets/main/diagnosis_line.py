"""The run's worst bottleneck in one line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainfast_tui.painting.painted import PaintedRun
from trainfast_tui.text.diagnosis_words import worst_bottleneck_line
from trainfast_tui.text.lines import Line

if TYPE_CHECKING:
    from trainfast_runner.running.follower import RunSnapshot


class DiagnosisLine(PaintedRun):
    """The worst bottleneck in one line; hidden before the first step."""

    DEFAULT_CSS = """
    DiagnosisLine { height: 1; display: none; }
    DiagnosisLine.-shown { display: block; }
    """

    def show_run(self, run: RunSnapshot | None) -> None:
        """Show this run's worst bottleneck."""
        self.set_class(run is not None and bool(run.steps), "-shown")
        super().show_run(run)

    def lines(self, width: int, height: int) -> list[Line]:
        return [] if self._run is None else [worst_bottleneck_line(self._run)]

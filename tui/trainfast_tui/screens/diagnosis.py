"""What holds a run back, with the figures it rests on, their thresholds and sources, and what to try."""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual.app import ComposeResult
from textual.screen import Screen

from trainfast_tui.screens.shared import PageActions
from trainfast_tui.text.diagnosis import explained
from trainfast_tui.text.keys import bindings, of
from trainfast_tui.text.lines import Line, rule
from trainfast_tui.widgets.page import Page
from trainfast_tui.widgets.strips import Footer

if TYPE_CHECKING:
    from trainfast_runner.running.follower import RunSnapshot
    from trainfast_tui.live.snapshot import Snapshot


class DiagnosisScreen(PageActions, Screen[None]):
    """Follows the run on the main screen."""

    SCOPE = "diagnosis"
    BINDINGS = [*bindings("diagnosis")]
    DEFAULT_CSS = "DiagnosisScreen { layout: vertical; overflow: hidden; }"

    def __init__(self, run: RunSnapshot, *, ascii: bool) -> None:
        super().__init__()
        self._run = run
        self._ascii = ascii

    def compose(self) -> ComposeResult:
        yield DiagnosisText(self._run, ascii=self._ascii)
        yield Footer([*of("diagnosis"), *of("everywhere")], ascii=self._ascii)

    def show_snapshot(self, snapshot: Snapshot) -> None:
        """The newest of the run; of another run nothing is taken over."""
        run = snapshot.run
        if run is not None and run.run_id == self._run.run_id:
            self._run = run
            self.query_one(DiagnosisText).show(run)


class DiagnosisText(Page):
    """All of it."""

    def __init__(self, run: RunSnapshot, *, ascii: bool) -> None:
        super().__init__(ascii=ascii)
        self._run = run

    def show(self, run: RunSnapshot) -> None:
        """Show this."""
        self._run = run
        self.repaint()

    def body(self, width: int) -> list[Line]:
        when = "now" if self._run.is_live else "in all"
        return [rule(f"what holds {self._run.run_id} back, {when}", width), [], *explained(self._run, width)]

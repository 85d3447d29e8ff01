"""A run's bottlenecks with their figures, thresholds and sources, and the changes to try."""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual.app import ComposeResult

from trainfast_tui.screens.base import AppScreen
from trainfast_tui.text.diagnosis import explained
from trainfast_tui.text.keys import bindings
from trainfast_tui.text.lines import Line, rule
from trainfast_tui.widgets.page import Page

if TYPE_CHECKING:
    from trainfast_runner.running.follower import RunSnapshot
    from trainfast_tui.live.snapshot import Snapshot
    from trainfast_tui.session import Session


class DiagnosisScreen(AppScreen):
    """Follows the run that is on the main screen when it is opened."""

    SCOPE = "diagnosis"
    BINDINGS = [*bindings(SCOPE)]

    def __init__(self, session: Session, run: RunSnapshot) -> None:
        super().__init__(session)
        self._run = run

    def compose(self) -> ComposeResult:
        yield DiagnosisText(self._run)
        yield self.footer()

    def show_snapshot(self, snapshot: Snapshot) -> None:
        """Paint the newest snapshot of this run, and none of another run."""
        run = snapshot.run
        if run is not None and run.run_id == self._run.run_id:
            self._run = run
            self.query_one(DiagnosisText).show(run)


class DiagnosisText(Page):
    """The whole diagnosis."""

    def __init__(self, run: RunSnapshot) -> None:
        super().__init__()
        self._run = run

    def show(self, run: RunSnapshot) -> None:
        """Show the diagnosis of this run."""
        self._run = run
        self.repaint()

    def body(self, width: int) -> list[Line]:
        when = "now" if self._run.is_live else "in all"
        return [rule(f"what holds {self._run.run_id} back, {when}", width), [], *explained(self._run, width)]

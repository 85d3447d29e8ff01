"""A run's bottlenecks with their figures, thresholds and sources, and the changes to try."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainfast_tui.screens.base import PageScreen
from trainfast_tui.text.diagnosis_words import diagnosis_section, no_bottleneck_in_run, overlap_words
from trainfast_tui.text.lines import Line, paragraph, rule

if TYPE_CHECKING:
    from trainfast_runner.running.follower import RunSnapshot
    from trainfast_tui.live.snapshot import Snapshot
    from trainfast_tui.session import Session


class DiagnosisScreen(PageScreen):
    """Follows the run that is on the main screen when it is opened."""

    SCOPE = "diagnosis"

    def __init__(self, session: Session, run: RunSnapshot) -> None:
        super().__init__(session)
        self._run = run

    def show_snapshot(self, snapshot: Snapshot) -> None:
        """Paint the newest snapshot of this run, and none of another run."""
        run = snapshot.run
        if run is not None and run.run_id == self._run.run_id:
            self._run = run
            self.repaint()

    def body(self, width: int) -> list[Line]:
        period_words = "now" if self._run.is_live else "in all"
        return [
            rule(f"bottlenecks of {self._run.run_id}, {period_words}", width),
            [],
            *_diagnosis_lines(self._run, width),
        ]


def _diagnosis_lines(run: RunSnapshot, width: int) -> list[Line]:
    """Return every diagnosis with its figures, in lines of `width` cells."""
    if not run.diagnosis:
        return [[(no_bottleneck_in_run(run), "text")]]
    lines = paragraph(overlap_words(run.diagnosis), width, "muted")
    for index, diagnosis in enumerate(run.diagnosis):
        title, section = diagnosis_section(diagnosis, width)
        lines += [*([[]] if index else []), rule(title, width), *section]
    return lines

"""Two runs side by side: the knobs that differ, and the change in throughput, memory and step time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from trainfast_runner.records.result import Result
from trainfast_runner.records.run_directory import state_text
from trainfast_runner.results.comparison import compare
from trainfast_runner.units import counted
from trainfast_tui.screens.base import PageScreen
from trainfast_tui.session import Session
from trainfast_tui.text.diagnosis_words import diagnosis_lines, no_bottleneck_in_run
from trainfast_tui.text.format import SYNTHETIC_BADGE, Line, rule
from trainfast_tui.text.result_words import comparison_lines

if TYPE_CHECKING:
    from trainfast_runner.running.follower import RunSnapshot
    from trainfast_tui.live.snapshot import Snapshot


class CompareScreen(PageScreen):
    """Compares `b` with `a`: the settings that differ, and the figures of both runs."""

    SCOPE = "compare"

    def __init__(self, session: Session, a: Result, b: Result) -> None:
        super().__init__(session)
        self._a, self._b = a, b
        self._labels = {result.run_id: session.run_words(result.run_id) for result in (a, b)}

    def answer_run_id(self) -> str:
        return self._b.run_id

    def reported(self) -> Sequence[str]:
        return self._a.run_id, self._b.run_id

    def action_swap(self) -> None:
        self._a, self._b = self._b, self._a
        self.repaint()

    def body(self, width: int) -> list[Line]:
        runs = [self._run_line(letter, result) for letter, result in (("A", self._a), ("B", self._b))]
        return [rule("compare", width), *runs, [], *comparison_lines(compare(self._a, self._b), width)]

    def _run_line(self, letter: str, result: Result) -> Line:
        words = f"  {state_text(result.state)}, {counted(result.steps.measured, 'step')} measured"
        badge = SYNTHETIC_BADGE if result.synthetic_data else []
        return [(f"{letter}  ", "key"), (self._labels[result.run_id], "title"), (words, "muted"), *badge]


class DiagnosisScreen(PageScreen):
    """Follows the run that is on the main screen when it is opened."""

    SCOPE = "diagnosis"

    def __init__(self, session: Session, run: RunSnapshot) -> None:
        super().__init__(session)
        self._run, self._label = run, session.run_words(run.run_id)

    def show_snapshot(self, snapshot: Snapshot) -> None:
        """Paint the newest snapshot of this run, and none of another run."""
        run = snapshot.run
        if run is not None and run.run_id == self._run.run_id:
            self._run = run
            self.repaint()

    def body(self, width: int) -> list[Line]:
        period_words = "now" if self._run.is_live else "in all"
        title = rule(f"bottlenecks of {self._label}, {period_words}", width)
        return [title, [], *diagnosis_lines(self._run.diagnosis, no_bottleneck_in_run(self._run), width)]

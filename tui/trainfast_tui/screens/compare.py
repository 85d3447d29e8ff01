"""Two runs side by side: the knobs that differ, and the change in throughput, memory and step time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from trainfast_runner.records.result import Result
from trainfast_runner.records.run_directory import state_text
from trainfast_runner.results.comparison import compare, pooled
from trainfast_runner.units import counted
from trainfast_tui.control.messages import Notified, RunsCompared
from trainfast_tui.screens.base import PageScreen
from trainfast_tui.session import Session
from trainfast_tui.text.diagnosis_words import diagnosis_lines, no_bottleneck_in_run
from trainfast_tui.text.format import SYNTHETIC_BADGE, Line, rule
from trainfast_tui.text.keys import key_of
from trainfast_tui.text.result_words import comparison_lines

if TYPE_CHECKING:
    from trainfast_runner.running.follower import RunSnapshot
    from trainfast_tui.live.snapshot import Snapshot


IN_TURN_ADVICE = f"{key_of('compare', 'in_turn')} runs both in turn, A B A B, for a verdict without these doubts"


class CompareScreen(PageScreen):
    """Compares run B with run A, or the runs of two settings that ran in turn: their settings and figures."""

    SCOPE = "compare"

    def __init__(self, session: Session, compared: RunsCompared) -> None:
        super().__init__(session)
        self._pairs = [*compared.earlier, (compared.a, compared.b)]

    def answer_run_id(self) -> str:
        return self._pairs[-1][1].run_id

    def reported(self) -> Sequence[str]:
        return [result.run_id for result in self._pairs[-1]]

    def action_swap(self) -> None:
        self._pairs = [(b, a) for a, b in self._pairs]
        self.repaint()

    def action_in_turn(self) -> None:
        if self.session.is_device_used or self.session.run_control.turn_words:
            self.notify("The device is in use: press the key again when it is free.", severity="warning")
            return
        self.session.run_control.start_in_turn(*self.reported())
        self.session.post(Notified("Running both settings in turn, A B A B; their comparison opens at the end."))
        self.dismiss()

    def body(self, width: int) -> list[Line]:
        runs = map(self._run_line, "AB", zip(*self._pairs, strict=True))
        comparison = pooled([compare(a, b) for a, b in self._pairs])
        return [rule("compare", width), *runs, [], *comparison_lines(comparison, width, IN_TURN_ADVICE)]

    def _run_line(self, letter: str, results: Sequence[Result]) -> Line:
        result, labels = results[-1], " and ".join(self.session.run_words(result.run_id) for result in results)
        words = f"  {state_text(result.state)}, {counted(result.steps.measured, 'step')} measured"
        badge = SYNTHETIC_BADGE if result.synthetic_data else []
        return [(f"{letter}  ", "key"), (labels, "title"), (words, "muted"), *badge]


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

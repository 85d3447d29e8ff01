"""The run's worst bottleneck in one line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainfast_tui.painting.painted import ShownRunWidget
from trainfast_tui.text.diagnosis_words import no_bottleneck_in_run
from trainfast_tui.text.keys import key_of
from trainfast_tui.text.lines import Line, Tone

if TYPE_CHECKING:
    from trainfast_runner.running.follower import RunSnapshot

SEVERITY_TONES: dict[str, Tone] = {"warning": "warning", "info": "secondary"}


class DiagnosisLine(ShownRunWidget):
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
        return [] if self._run is None else [_worst_bottleneck(self._run)]


def _worst_bottleneck(run: RunSnapshot) -> Line:
    """Return the worst bottleneck in one line, or that none was found."""
    if not run.diagnosis:
        return [(no_bottleneck_in_run(run), "muted")]
    worst, other_count = run.diagnosis[0], len(run.diagnosis) - 1
    return [
        (f"{key_of('main', 'diagnosis')} ", "key"),
        (worst.line, SEVERITY_TONES.get(worst.severity, "text")),
        (f"  and {other_count} more" if other_count else "", "muted"),
    ]

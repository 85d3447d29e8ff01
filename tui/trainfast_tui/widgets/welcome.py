"""The screens in place of the main one: first keys before any run, the essentials in a small terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainfast_runner.records.state_words import state_words
from trainfast_tui.charts.painted import Painted
from trainfast_tui.live.figures import planned_steps, recent_figures
from trainfast_tui.text import format as fmt
from trainfast_tui.text.lines import Line, wrap
from trainfast_tui.widgets.strips import STATE_SIGNS

if TYPE_CHECKING:
    from trainfast_runner.running.follower import RunSnapshot


class Welcome(Painted):
    """The keys to press before the first run."""

    DEFAULT_CSS = """
    Welcome { height: auto; min-height: 11; display: none; }
    Welcome.-shown { display: block; height: 1fr; }
    """

    def __init__(self) -> None:
        super().__init__()
        self._preset = ""

    def show(self, preset: str) -> None:
        """Name the preset that `r` would run."""
        if preset != self._preset:
            self._preset = preset
            self.repaint()

    def lines(self, width: int, height: int) -> list[Line]:
        keys = (
            ("r", f"train {self._preset} for a few seconds, and watch it here"),
            ("p", "choose another preset"),
            ("↑ ↓", "pick a knob; its cost in speed and memory is below it"),
            ("← →", "turn it; Enter types a value"),
            ("?", "every key and every knob"),
            ("q", "leave; a run goes on without this screen"),
        )
        body: list[Line] = [
            [("No run yet.", "title")],
            *(
                [(line, "muted")]
                for line in wrap("A run trains for real, for seconds, and keeps no weights.", width - 2)
            ),
            [],
        ]
        for key, text in keys:
            first, *rest = wrap(text, max(8, width - 9))
            body += [[(f" {key:<5}", "key"), (first, "text")], *([(f"{'':<6}{line}", "text")] for line in rest)]
        return [[] for _ in range(max(0, (height - len(body)) // 3))] + [[("  ", "text"), *line] for line in body]


class TooSmall(Painted):
    """The essentials of a run for a terminal that is too small."""

    DEFAULT_CSS = """
    TooSmall { height: 1fr; display: none; }
    """

    def __init__(self) -> None:
        super().__init__()
        self._run: RunSnapshot | None = None

    def show(self, run: RunSnapshot | None) -> None:
        """Show the essentials of this run."""
        self._run = run
        self.repaint()

    def lines(self, width: int, height: int) -> list[Line]:
        size = self.screen.size
        lines: list[Line] = [[(f"This terminal is {size.width}x{size.height}; the screen needs 80x24.", "warning")]]
        run = self._run
        if run is None:
            return [*lines, [("No run. r starts one, q leaves.", "text")]]
        planned, figures = planned_steps(run), recent_figures(run)
        done = run.steps[-1].step if run.steps else 0
        peak = run.result.memory.peak_allocated_bytes if run.result is not None else run.peak_allocated_bytes
        sign, tone = STATE_SIGNS.get(run.state, ("○", "text"))
        return [
            *lines,
            [(f"{sign} {state_words(run.state)}", tone), (f"  {run.run_id}", "muted")],
            [(f"step {fmt.count(done)} of {fmt.count(planned)}", "title")],
            [(fmt.per_second(figures.samples_per_s, "samples"), "title"), _synthetic(run)],
            [("peak allocated ", "muted"), (fmt.size(peak), "text")],
            [(run.reason, "text")],
        ]


def _synthetic(run: RunSnapshot) -> tuple[str, str]:
    return ("  synthetic data" if run.synthetic else "", "warning")

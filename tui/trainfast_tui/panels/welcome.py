"""The screens in place of the main one: first keys before any run, the essentials in a small terminal."""

from __future__ import annotations

from trainfast_runner.records.run_directory import state_text
from trainfast_tui.live.figures import peak_allocated_bytes, run_figures, run_label, step_words
from trainfast_tui.painting import PaintedWidget, ShownRunWidget
from trainfast_tui.text import format as fmt
from trainfast_tui.text.format import SYNTHETIC_MARK, Line, followed_run_sign, labelled, paragraph
from trainfast_tui.text.keys import PRESET_KEY, RUN_KEY, SCRIPT_KEY, key_of
from trainfast_tui.text.memory_words import peak_word_of

MIN_WIDTH, MIN_HEIGHT = 80, 24
"""The least columns and lines of the main screen."""


class Welcome(PaintedWidget):
    """The keys to press before the first run."""

    _effect_of_r = ""

    def show_effect_of_r(self, words: str) -> None:
        """Show the effect of the key `r`."""
        self._effect_of_r = words
        self.repaint()

    def lines(self, width: int, height: int) -> list[Line]:
        keys = (
            (RUN_KEY, f"{self._effect_of_r}, and watch it here"),
            (PRESET_KEY, "choose another preset"),
            (SCRIPT_KEY, "your own script: find its flags and train it"),
            ("↑ ↓", "pick a knob; its cost in speed and memory is below it"),
            ("← →", f"turn it; {key_of('main', 'KnobPanel.type_value')} types a value"),
            (key_of("everywhere", "help"), "every key and every knob"),
            (key_of("main", "back"), "leave; a run goes on without this screen"),
        )
        about = "A run trains for real, for seconds, and keeps no weights."
        body: list[Line] = [[("No run yet.", "title")], *paragraph(about, width - 2, "muted"), []]
        for key, text in keys:
            body += labelled((f" {key:<5}", "key"), text, width - 3)
        return [[] for _ in range(max(0, (height - len(body)) // 3))] + [[("  ", "text"), *line] for line in body]


class TooSmall(ShownRunWidget):
    """The essentials of a run for a terminal that is too small."""

    def lines(self, width: int, height: int) -> list[Line]:
        size = self.screen.size
        needs: Line = [(f"Needs {MIN_WIDTH}x{MIN_HEIGHT}; this terminal is {size.width}x{size.height}.", "warning")]
        run = self._run
        if run is None:
            return [needs, [(f"No run. {RUN_KEY} starts one, {key_of('main', 'back')} leaves.", "text")]]
        figures = run_figures(run)
        warmup, synthetic = " of warm-up" * figures.warming_up, f"  {SYNTHETIC_MARK}" if run.synthetic else ""
        sign, tone = followed_run_sign(run)
        return [
            needs,
            [(f"{sign} {state_text(run.state)}", tone), (f"  {run_label(run)}", "muted")],
            [(step_words(run), "title")],
            [(fmt.per_second(figures.samples_per_s, "samples"), "title"), (warmup + synthetic, "warning")],
            [(f"peak {peak_word_of(run.run_file)} ", "muted"), (fmt.size(peak_allocated_bytes(run)), "text")],
            [(fmt.with_sizes(run.reason), "text")],
        ]

"""The figures of the run: progress, throughput, phases of a step, loss and memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from trainfast_tui.live.figures import (
    Figures,
    first_and_last_loss,
    peak_allocated_bytes,
    planned_steps,
    predicted_peak_bytes,
    run_figures,
    seconds_left,
    step_words,
)
from trainfast_tui.painting import ShownRunWidget
from trainfast_tui.panels.devices import bar, stacked_cells
from trainfast_tui.panels.run_lines import LONG_STEP_WORDS_FROM, conditions_line, has_conditions, steadiness
from trainfast_tui.text import format as fmt
from trainfast_tui.text.format import DOUBT_SIGN, PHASE_TONES, SYNTHETIC_BADGE, Line, line_length
from trainfast_tui.text.memory_words import against_predicted_memory, peak_word_of

if TYPE_CHECKING:
    from trainfast_runner.running.follower import RunSnapshot


PHASE_GLYPHS = {"data": "░", "forward": "█", "backward": "▓", "optimizer": "▒", "other": "·"}
SHORT_PHASES = {"optimizer": "optim", "backward": "back", "forward": "fwd"}
"""Names of phases where there is little room."""
WIDE_PROGRESS_FROM = 66
"""Columns from which the words beside the progress bar have much room."""
FIRST_COLUMN_CELLS = 19
"""Cells of the first figure of each line, without the space after it."""
LONG_RATE_CELLS, SHORT_RATE_CELLS = (FIRST_COLUMN_CELLS, 18), (17, 16)
"""Cells of samples and of tokens a second."""
PROGRESS_LABEL_CELLS = 22
"""The least cells of the words after the progress bar, which then keeps its length."""
TWO_LEGEND_ROWS_FROM = 6
"""Lines of the panel, without the one about the devices, from which a legend of short names has two rows."""
FIRST_ROW_PHASES = 3


class StepPanel(ShownRunWidget):
    """Five lines about the run, six on a narrow screen; one more if its devices were watched."""

    DEFAULT_CSS = """
    StepPanel { height: 5; }
    StepPanel.-watched { height: 6; }
    """

    def show_run(self, run: RunSnapshot | None) -> None:
        """Show the figures of this run."""
        self.set_class(run is not None and has_conditions(run), "-watched")
        super().show_run(run)

    def lines(self, width: int, height: int) -> list[Line]:
        run = self._run
        if run is None:
            return []
        figures, is_doubtful = run_figures(run), run.result is not None and bool(run.result.doubts)
        watched = [conditions_line(run, width)] if self.has_class("-watched") else []
        return [
            _progress_line(run, width),
            _speed_line(figures, width, is_doubtful=is_doubtful) + ([] if watched else _steadiness_pieces(run, width)),
            _loss_and_memory_line(run, width),
            *watched,
            *_phase_lines(figures.phases, width, height - len(watched)),
        ]


def _progress_line(run: RunSnapshot, width: int) -> Line:
    steps_done, planned = (run.steps[-1].step if run.steps else 0), planned_steps(run)
    share = steps_done / planned if planned else None
    left_s = seconds_left(run)
    if run.is_live:
        end = f"{fmt.duration(left_s)} left" if left_s is not None else ""
    else:
        seconds_taken = run.result.seconds if run.result is not None else None
        end = f"took {fmt.duration(seconds_taken)}" if seconds_taken is not None else ""
    words = step_words(run)
    label = f" {fmt.fraction(share)}  {end}"
    narrow = width < WIDE_PROGRESS_FROM
    line: Line = [(f"{words} " if narrow else f"{words:<{FIRST_COLUMN_CELLS}} ", "title")]
    text_width = (
        len(words) + 1 + len(label)
        if narrow
        else max(FIRST_COLUMN_CELLS, len(words)) + 1 + max(PROGRESS_LABEL_CELLS, len(label))
    )
    return [*line, *bar(share, max(4, width - text_width)), (label, "text")]


def _speed_line(figures: Figures, width: int, *, is_doubtful: bool) -> Line:
    long_words = width >= LONG_STEP_WORDS_FROM
    samples_cells, tokens_cells = LONG_RATE_CELLS if long_words else SHORT_RATE_CELLS
    rate = f"{DOUBT_SIGN} " * is_doubtful + fmt.per_second(figures.samples_per_s, "samples")
    line: Line = [
        (fmt.to_width(rate, samples_cells) + " ", "warning" if is_doubtful else "title"),
        (fmt.to_width(fmt.per_second(figures.tokens_per_s, "tokens"), tokens_cells), "text"),
        (f"{fmt.milliseconds(figures.step_ms)}{' a step' if long_words else ''}", "text"),
    ]
    if long_words:
        line.append((f"   {figures.basis}", "muted"))
    return line


def _steadiness_pieces(run: RunSnapshot, width: int) -> Line:
    """Return the steadiness of the step time, for runs without a line about the devices."""
    mark = steadiness(run) if width >= LONG_STEP_WORDS_FROM else None
    return [("   ", "text"), (mark.words, mark.tone)] if mark is not None else []


def _loss_and_memory_line(run: RunSnapshot, width: int) -> Line:
    (first, last), peak = first_and_last_loss(run), peak_allocated_bytes(run)
    line: Line = [
        (f"{f'loss {fmt.number(first)} → {fmt.number(last)}':<{FIRST_COLUMN_CELLS}} ", "text"),
        (f"peak {peak_word_of(run.run_file)} ", "muted"),
        (fmt.size(peak), "text"),
    ]
    predicted = predicted_peak_bytes(run)
    if predicted is not None and width >= LONG_STEP_WORDS_FROM:
        line += [(f" ({against_predicted_memory(peak, predicted)})", "muted")]
    if run.synthetic:
        line += SYNTHETIC_BADGE
    actual = run.actual
    if actual is not None and width >= LONG_STEP_WORDS_FROM:
        ranks = f"{actual.world_size} ranks, " if actual.world_size and actual.world_size > 1 else ""
        wrapper = f"{actual.wrapper}, " if actual.wrapper not in (None, "none") else ""
        line += [(f"   {ranks}{wrapper}{actual.compute_dtype or ''} on {actual.device or ''}", "muted")]
    return line


def _phase_lines(phases: dict[str, float | None], width: int, height: int) -> list[Line]:
    """Return a stacked bar and its legend, in two lines on a narrow screen."""
    if not any(phases.values()):
        return []
    cells = stacked_cells([phases[name] or 0.0 for name in PHASE_GLYPHS], width)
    stacked: Line = [
        (glyph * count, PHASE_TONES[name]) for (name, glyph), count in zip(PHASE_GLYPHS.items(), cells, strict=True)
    ]
    legend: Line = []
    for name in PHASE_GLYPHS:
        legend += [*_legend_entry(name, name), (f"{fmt.milliseconds(phases[name])}   ", "text")]
    if line_length(legend) - 3 <= width:
        return [stacked, legend]
    names = list(PHASE_GLYPHS)
    rows = (names[:FIRST_ROW_PHASES], names[FIRST_ROW_PHASES:]) if height >= TWO_LEGEND_ROWS_FROM else (names,)
    return [stacked, *(_short_legend(row, phases) for row in rows)]


def _short_legend(names: Sequence[str], phases: dict[str, float | None]) -> Line:
    """Return the legend of these phases with short names, and the unit once at the end."""
    legend: Line = []
    for name in names:
        legend += [*_legend_entry(name, SHORT_PHASES.get(name, name)), (f"{_short_figure(phases[name])} ", "text")]
    return [*legend, ("ms", "text")]


def _short_figure(milliseconds: float | None) -> str:
    """Return a figure of five cells at most below 10,000: thousandths of a millisecond are the least shown."""
    is_small = milliseconds is not None and milliseconds < 0.1
    return f"{milliseconds:.3f}" if is_small else fmt.number(milliseconds)


def _legend_entry(name: str, label: str) -> Line:
    """Return the sign of a phase and its label."""
    return [(f"{PHASE_GLYPHS[name]} ", PHASE_TONES[name]), (f"{label} ", "muted")]

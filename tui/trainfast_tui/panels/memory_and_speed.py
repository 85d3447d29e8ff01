"""The predicted memory and speed of the next run."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from trainfast_tui.next_run.sources import NextRunMemory, NextRunSpeed
from trainfast_tui.painting import GrowingPanel
from trainfast_tui.text import format as fmt
from trainfast_tui.text.device_lines import stacked_cells
from trainfast_tui.text.format import Line, Piece, Tone, first_fitting, join_pieces, packed, paragraph, rule
from trainfast_tui.text.memory_words import CATEGORY_WORDS, phase_words, short_category
from trainfast_tui.text.next_run_words import speed_text

if TYPE_CHECKING:
    from trainfast_runner.memory.headroom import PredictedFit


PART_SIGNS: dict[str, Piece] = {
    "params": ("█", "primary"),
    "frozen": ("╱", "primary"),
    "quantized": ("╲", "primary"),
    "grads": ("▓", "secondary"),
    "optimizer": ("▒", "accent"),
    "activations": ("░", "success"),
    "temporary": ("▚", "text"),
    "communication": ("≈", "primary"),
    "context": ("┄", "muted"),
    "margin": ("┈", "muted"),
}
"""The sign and the tone of each part of the bar."""
LONG_FORM_COLUMNS, LONG_FORM_LINES = 40, 34
"""The least columns of a panel in its long form, with title and legend, and the least lines of the screen."""
LIMIT_SIGN = "┃"
"""The sign of the limit."""


class Predictions(GrowingPanel):
    """The memory and the speed of the next run; hidden while neither is known."""

    _memory: NextRunMemory | None = None
    _speed: NextRunSpeed | None = None

    def show_predictions(self, memory: NextRunMemory | None, speed: NextRunSpeed | None) -> None:
        """Show this memory and this speed."""
        # The time of a trace goes on while the rest stays the same.
        if (memory, speed) != (self._memory, self._speed) or (memory is not None and memory.since_ns is not None):
            self._memory, self._speed = memory, speed
            self.set_shown(memory is not None or speed is not None)

    def lines(self, width: int, height: int) -> list[Line]:
        if width <= 0:
            return []
        lines = [] if self._memory is None else memory_lines(self._memory, width, self.screen.size.height)
        return lines if self._speed is None else [*lines, speed_line(self._speed, width)]


def memory_lines(memory: NextRunMemory, width: int, screen_height: int) -> list[Line]:
    """Return the bar in lines of `width` cells, with its legend if width and height allow."""
    long_form = width >= LONG_FORM_COLUMNS and screen_height >= LONG_FORM_LINES
    fit = memory.fit
    if fit is None:
        return [rule("memory", width), *_reason_lines(memory, width, 4 if long_form else 2)]
    bar = _bar_line(fit, width)
    if not long_form:
        return [_peak_line(fit, width, memory.reference_bytes), bar, *_verdict_lines(fit, width, 2)]
    title = rule(f"memory at its peak: {phase_words(fit.predicted.phase)}", width)
    peak = _peak_line(fit, width, memory.reference_bytes)
    return [title, bar, *_legend_lines(fit, width), peak, *_verdict_lines(fit, width, 4)]


def _verdict_lines(fit: PredictedFit, width: int, max_lines: int) -> list[Line]:
    """Return the memory left, or why the run is impossible here."""
    if fit.refusal is not None:
        return paragraph(f"cannot run here: {fit.refusal.line_without_option()}", width, "error", max_lines)
    return [_bytes_left_line(fit, width)]


def _reason_lines(memory: NextRunMemory, width: int, max_lines: int) -> list[Line]:
    words = memory.reason
    if memory.since_ns is not None:
        words += f" {fmt.elapsed(memory.since_ns, time.monotonic_ns())}"
    return paragraph(words, width, "warning" if memory.failed else "muted", max_lines)


def _peak_line(fit: PredictedFit, width: int, reference_bytes: int | None) -> Line:
    """Return the predicted peak, its change, and its limit, with the owner of the limit where there is room."""
    available = fit.available
    label: Line = [("predicted ", "muted")]
    peak: Line = [(fmt.size(fit.predicted.total_bytes), "title")]
    change = fmt.percent_change(fit.predicted.total_bytes, reference_bytes)
    if change is not None:
        peak.append((f" ({fmt.signed_percent(change)})", "warning" if change > 0 else "success"))
    if available is None:
        return [*label, *peak]
    with_context = available.with_context and fit.predicted.context_bytes
    peak.append((" + context" if with_context else " + margin" if fit.margin_bytes else "", "text"))
    peak.append((f" of {fmt.size(available.size_bytes)}", "text"))
    return first_fitting([[*label, *peak, (f" ({available.source})", "muted")], [*label, *peak], peak], width)


def _bytes_left_line(fit: PredictedFit, width: int) -> Line:
    left_bytes, max_batch = fit.left_bytes, fit.max_batch
    if left_bytes is None:
        return [("no limit is known", "muted")]
    heads = [f"{fmt.size(left_bytes)} left"]
    if left_bytes < 0:
        heads = [f"does not fit: {fmt.size(-left_bytes)} too much", f"{fmt.size(-left_bytes)} too much", "does not fit"]
    tails = [f"  batch_size up to {max_batch:,}", f"  batch <= {max_batch:,}"] if max_batch else []
    if max_batch == 0:
        tails = ["; batch_size 1 does not fit", "; nor batch 1"]
    head_tone: Tone = "error" if left_bytes < 0 else "success"
    tail_tone: Tone = "error" if max_batch == 0 else "text"
    # The missing bytes and the way out matter more than long words.
    return first_fitting([[(head, head_tone), (tail, tail_tone)] for tail in [*tails, ""] for head in heads], width)


def _bar_line(fit: PredictedFit, width: int) -> Line:
    """Return the categories side by side, then the free rest, with the limit as a line across."""
    # The whole width is the limit, or a prediction above it.
    scale = float(max(0 if fit.available is None else fit.available.size_bytes, fit.needed_bytes, 1))
    parts = _shown_parts(fit)
    # On a large device a small model would be one cell: each category keeps its own.
    used_cells = min(width, max(len(parts), round(fit.needed_bytes / scale * width)))
    cells = stacked_cells([float(size) for _, size in parts], used_cells)
    line: Line = []
    for (key, _), count in zip(parts, cells, strict=True):
        line += [PART_SIGNS[key]] * count
    line += [("·", "muted")] * (width - len(line))
    if fit.available is not None:
        limit_cell = min(width - 1, int(fit.available.size_bytes / scale * width))
        line[limit_cell] = (LIMIT_SIGN, "error")
    return join_pieces(line)


def _shown_parts(fit: PredictedFit) -> list[tuple[str, int]]:
    with_context = fit.available is not None and fit.available.with_context
    parts = [(name, fit.predicted.category(name)) for name in CATEGORY_WORDS]
    parts += [("context", fit.predicted.context_bytes or 0 if with_context else 0), ("margin", fit.margin_bytes)]
    return [(name, size) for name, size in parts if size > 0]


def _legend_lines(fit: PredictedFit, width: int) -> list[Line]:
    """Return the legend, two entries a line: sign, word and figure."""
    sizes = dict(_shown_parts(fit))
    entries: list[Line] = [
        [(f"{sign} ", tone), (f"{short_category(key)} {fmt.size(sizes[key])}", "text")]
        for key, (sign, tone) in PART_SIGNS.items()
        if key in sizes
    ]
    return packed(entries, width, gap=1, stop=max(1, width // 2))


def speed_line(speed: NextRunSpeed, width: int) -> Line:
    """Return the prediction with its interval, or its change from the run on the screen or the preset."""
    label: Piece = ("predicted ", "muted")
    if speed.change_percent is None:
        words: Piece = (speed_text(speed.predicted), "title")
        return first_fitting([[label, words], [words]], width)
    percent = fmt.signed_percent(speed.change_percent)
    change = f"{percent} from {fmt.number(speed.reference_samples_per_s)}"
    tone: Tone = "success" if speed.change_percent >= 0 else "warning"
    start: Line = [(f"{fmt.number(speed.predicted.median)}/s, ", "title")]
    layouts = ([label, *start, (f"{change}/s", tone)], [*start, (change, tone)], [*start, (percent, tone)])
    return first_fitting(layouts, width)

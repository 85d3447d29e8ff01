"""The predicted memory and speed of the next run, each beside the last measured one."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from trainfast_tui.next_run.sources import MeasuredMemory, MeasuredSpeed, NextRunMemory, NextRunSpeed
from trainfast_tui.painting import GrowingPanel
from trainfast_tui.panels.devices import LONG_FORM_COLUMNS, MEASURED_SIGN, has_long_form, stacked_cells
from trainfast_tui.text import format as fmt
from trainfast_tui.text.format import Line, Piece, Tone, first_fitting, join_pieces, line_length, paragraph, rule
from trainfast_tui.text.memory_words import CATEGORY_WORDS, against_predicted_memory, phase_words, short_category
from trainfast_tui.text.next_run_words import speed_text

if TYPE_CHECKING:
    from trainfast_runner.memory.headroom import PredictedFit
    from trainfast_runner.records.run_file import PredictedSpeed


PART_SIGNS: dict[str, Piece] = {
    "params": ("█", "primary"),
    "grads": ("▓", "secondary"),
    "optimizer": ("▒", "accent"),
    "activations": ("░", "success"),
    "temporary": ("▚", "text"),
    "communication": ("≈", "primary"),
    "context": ("┄", "muted"),
    "margin": ("┈", "muted"),
}
"""The sign and the tone of each part of the bar."""
LIMIT_SIGN = "┃"
"""The sign of the limit."""
CORRECTED = ("above: corrected by the runs measured since", "above: corrected since")
OTHER_KNOBS = ("above: the next run, with other knobs", "above: with other knobs")
"""Why the next run's prediction, which stands above, differs from that of the measured run: in long and in short."""


class Predictions(GrowingPanel):
    """The memory and the speed of the next run; hidden while neither is known."""

    _memory: NextRunMemory | None = None
    _speed: NextRunSpeed | None = None

    def show_predictions(self, memory: NextRunMemory | None, speed: NextRunSpeed | None) -> None:
        """Show this memory and this speed."""
        # The time of a trace goes on while the rest stays the same.
        if (memory, speed) != (self._memory, self._speed) or (memory is not None and memory.since_ns is not None):
            self._memory, self._speed = memory, speed
            has_speed = speed is not None and (speed.predicted is not None or speed.measured is not None)
            self.set_shown(memory is not None or has_speed)

    def lines(self, width: int, height: int) -> list[Line]:
        if width <= 0:
            return []
        lines = [] if self._memory is None else memory_lines(self._memory, width, self.screen.size.height)
        return lines if self._speed is None else [*lines, *speed_lines(self._speed, width)]


def memory_lines(memory: NextRunMemory, width: int, screen_height: int) -> list[Line]:
    """Return the bar in lines of `width` cells, with its legend if width and height allow."""
    lines = _predicted_lines(memory, width, has_long_form(width, screen_height))
    return lines if memory.measured is None else [*lines, *_measured_lines(memory, memory.measured, width)]


def _predicted_lines(memory: NextRunMemory, width: int, long_form: bool) -> list[Line]:
    fit = memory.fit
    if fit is None:
        return [rule("memory", width), *_reason_lines(memory, width, 4 if long_form else 2)]
    bar = _bar_line(fit, memory.measured, width)
    if not long_form:
        return [_peak_line(fit, width), bar, *_verdict_lines(fit, width, 2)]
    title = rule(f"memory at its peak: {phase_words(fit.predicted.phase)}", width)
    lines = [
        title,
        bar,
        *_legend_lines(fit, width),
        _peak_line(fit, width),
        *_change_lines(fit, memory.reference_bytes),
    ]
    return [*lines, *_verdict_lines(fit, width, 4)]


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


def _change_lines(fit: PredictedFit, reference_bytes: int | None) -> list[Line]:
    """Return the change of the predicted peak from the run on the screen, or from the preset; empty without any."""
    change = fmt.percent_change(fit.predicted.total_bytes, reference_bytes)
    if change is None:
        return []
    words = f"{fmt.signed_percent(change)} from {fmt.size(reference_bytes)}"
    return [[("change: ", "muted"), (words, "warning" if change > 0 else "success")]]


def _peak_line(fit: PredictedFit, width: int) -> Line:
    """Return the predicted peak and its limit, with the owner of the limit where there is room."""
    available = fit.available
    line: Line = [("predicted ", "muted"), (fmt.size(fit.predicted.total_bytes), "title")]
    if available is None:
        return line
    limit_words = f" of {fmt.size(available.size_bytes)}"
    with_context = available.with_context and fit.predicted.context_bytes
    if (with_context or fit.margin_bytes) and width < LONG_FORM_COLUMNS:
        # The allocator's peak and the context do not both fit.
        sizes: Line = [(fmt.size(fit.needed_bytes), "title"), (limit_words, "text")]
        head = "with context " if with_context else "with margin "
        return [(head if len(head) + line_length(sizes) <= width else "needs ", "muted"), *sizes]
    line.append((" + context" if with_context else " + margin" if fit.margin_bytes else "", "text"))
    line.append((limit_words, "text"))
    source_words = f" ({available.source})"
    return [*line, (source_words, "muted")] if line_length(line) + len(source_words) <= width else line


def _bytes_left_line(fit: PredictedFit, width: int) -> Line:
    left_bytes = fit.left_bytes
    if left_bytes is None:
        return [("no limit is known", "muted")]
    max_batch = fit.max_batch
    if left_bytes >= 0:
        heads: tuple[str, ...] = (f"{fmt.size(left_bytes)} left",)
    else:
        heads = (f"does not fit: {fmt.size(-left_bytes)} too much", f"{fmt.size(-left_bytes)} too much", "does not fit")
    if max_batch is None:
        tails: tuple[str, ...] = ("",)
    elif max_batch == 0:
        tails = ("; batch_size 1 does not fit", "; nor batch 1", "")
    else:
        tails = (f"  batch_size up to {max_batch:,}", f"  batch <= {max_batch:,}", "")
    # The missing bytes and the way out matter more than long words; the last pair always fits.
    pairs = [(head, tail) for tail in tails for head in heads]
    head, tail = next((pair for pair in pairs if len(pair[0]) + len(pair[1]) <= width), (heads[-1], ""))
    return [(head, "error" if left_bytes < 0 else "success"), (tail, "error" if max_batch == 0 else "text")]


def _bar_line(fit: PredictedFit, measured: MeasuredMemory | None, width: int) -> Line:
    """Return the categories side by side, then the free rest, with the limit as a line across."""
    scale = _scale_bytes(fit, measured)
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


def _scale_bytes(fit: PredictedFit | None, measured: MeasuredMemory | None) -> float:
    """Return the bytes of the whole width: the limit, or a prediction or measurement above it."""
    available = fit.available.size_bytes if fit is not None and fit.available is not None else 0
    needed = fit.needed_bytes if fit is not None else 0
    return float(max(available, needed, measured.peak_bytes if measured is not None else 0, 1))


def _shown_parts(fit: PredictedFit) -> list[tuple[str, int]]:
    with_context = fit.available is not None and fit.available.with_context
    parts = [(name, fit.predicted.category(name)) for name in CATEGORY_WORDS]
    parts += [("context", fit.predicted.context_bytes or 0 if with_context else 0), ("margin", fit.margin_bytes)]
    return [(name, size) for name, size in parts if size > 0]


def _legend_lines(fit: PredictedFit, width: int) -> list[Line]:
    """Return the legend, two entries a line: sign, word and figure."""
    sizes = dict(_shown_parts(fit))
    column_width = width // 2
    cells: list[Line] = []
    for key, (sign, tone) in PART_SIGNS.items():
        if key in sizes:
            # A long word is cut, never a figure.
            figure = fmt.size(sizes[key])
            word = fmt.truncate(short_category(key), max(1, column_width - 4 - len(figure)))
            text = fmt.to_width(f"{word} {figure}", column_width - 3)
            cells.append([(f"{sign} ", tone), (f"{text} ", "text")])
    return [[piece for cell in cells[first : first + 2] for piece in cell] for first in range(0, len(cells), 2)]


def _measured_lines(memory: NextRunMemory, measured: MeasuredMemory, width: int) -> list[Line]:
    """Return the measured peak on the same scale, and beside it the peak predicted for its run."""
    filled = max(1, min(width, round(measured.peak_bytes / _scale_bytes(memory.fit, measured) * width)))
    bar: Line = [(MEASURED_SIGN * filled, "title")]
    predicted = measured.predicted_bytes
    if predicted is None and measured.has_same_knobs and memory.fit is not None:
        predicted = memory.fit.predicted.total_bytes
    peak: Piece = (fmt.size(measured.peak_bytes), "title")
    start: Line = [("measured ", "muted"), peak]
    if not predicted:
        knobs_piece: Piece = ("" if measured.has_same_knobs else " with other knobs", "muted")
        return [bar, first_fitting([[*start, knobs_piece], start], width)]
    predicted_piece: Piece = (f" (predicted {fmt.size(predicted)})", "text")
    difference_piece: Piece = (f" ({against_predicted_memory(measured.peak_bytes, predicted)})", "text")
    figures = first_fitting([[*start, difference_piece], [*start, predicted_piece], [peak, predicted_piece]], width)
    if memory.fit is None or fmt.size(memory.fit.predicted.total_bytes) == fmt.size(predicted):
        return [bar, figures]
    reasons = CORRECTED if measured.has_same_knobs else OTHER_KNOBS
    return [bar, figures, first_fitting([[(words, "muted")] for words in reasons], width)]


def speed_lines(speed: NextRunSpeed, width: int) -> list[Line]:
    """Return the prediction with its change from the run on the screen or the preset, and the measured speed."""
    lines = [] if speed.predicted is None else [_predicted_speed_line(speed, speed.predicted, width)]
    return lines if speed.measured is None else [*lines, _measured_speed_line(speed.measured, width)]


def _predicted_speed_line(speed: NextRunSpeed, predicted: PredictedSpeed, width: int) -> Line:
    label: Piece = ("predicted ", "muted")
    if speed.change_percent is None:
        words: Piece = (speed_text(predicted), "title")
        return first_fitting([[label, words], [words]], width)
    percent = fmt.signed_percent(speed.change_percent)
    change = f"{percent} from {fmt.number(speed.reference_samples_per_s)}"
    tone: Tone = "success" if speed.change_percent >= 0 else "warning"
    start: Line = [(f"{fmt.number(predicted.median)}/s, ", "title")]
    layouts = ([label, *start, (f"{change}/s", tone)], [*start, (f"{change}/s", tone)], [*start, (change, tone)])
    return first_fitting([*layouts, [*start, (percent, tone)]], width)


def _measured_speed_line(measured: MeasuredSpeed, width: int) -> Line:
    rate, predicted = fmt.number(measured.samples_per_s), measured.predicted
    start: Line = [("measured ", "muted"), (f"{rate} samples/s", "title")]
    if predicted is None or not predicted.median:
        return start
    predicted_rate = fmt.number(predicted.median)
    difference = fmt.signed_percent(fmt.percent_change(measured.samples_per_s, predicted.median))
    return first_fitting(
        [
            [*start, (f" (predicted {predicted_rate}, {difference})", "text")],
            [*start[:1], (f"{rate}/s", "title"), (f" (predicted {predicted_rate}/s, {difference})", "text")],
            [("ran ", "muted"), (f"{rate}/s", "title"), (f", predicted {predicted_rate}/s", "text")],
            [(f"{rate}/s", "title"), (f", predicted {predicted_rate}/s", "text")],
        ],
        width,
    )

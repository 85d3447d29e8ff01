"""The lines about the run: progress, throughput, phases, loss, memory, devices during its steps, worst bottleneck."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from trainfast_runner.errors import mean_of_known
from trainfast_tui.live.figures import (
    Figures,
    counted_steps,
    first_and_last_loss,
    peak_allocated_bytes,
    planned_steps,
    predicted_peak_bytes,
    run_figures,
    seconds_left,
    silent_gpus,
    step_words,
    worst_gpu,
)
from trainfast_tui.painting import ShownRunWidget
from trainfast_tui.panels.devices import bar, stacked_cells
from trainfast_tui.text import format as fmt
from trainfast_tui.text.diagnosis_words import no_bottleneck_in_run
from trainfast_tui.text.event_words import SHADES
from trainfast_tui.text.format import DOUBT_SIGN, PHASE_TONES, SYNTHETIC_BADGE, Line, Tone, first_fitting, line_length
from trainfast_tui.text.keys import key_of
from trainfast_tui.text.memory_words import against_predicted_memory, peak_word_of

if TYPE_CHECKING:
    from trainfast_runner.results.device_conditions import StepConditions
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
    mark = steadiness(run) if width >= LONG_STEP_WORDS_FROM else []
    return [("   ", "text"), *mark] if mark else []


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


LONG_STEP_WORDS_FROM = 78
"""Columns from which the words are long."""
MIN_THROTTLED_MS = 0.05
"""Less throttled time of a step is not named: it would print as 0.0 ms."""
MIN_CLOCK_LOSS = 0.005
"""A smaller loss prints as 0 %, so the clock is called at its maximum."""


def has_conditions(run: RunSnapshot) -> bool:
    """True if the run has device conditions of its steps, or is still warming up."""
    return bool(run.conditions) or run.steady.still_warming is True


def conditions_line(run: RunSnapshot, width: int) -> Line:
    """Return the line under a run's figures; the least important parts are left out where `width` is too small."""
    conditions, long_words = counted_steps(run), width >= LONG_STEP_WORDS_FROM
    warming = steadiness(run, short=not long_words)
    if not conditions:
        return warming
    indexes = silent_gpus(run.conditions) if run.is_live else []
    if indexes and len(indexes) == len(conditions[-1].devices):
        return [*_no_reading_line(indexes), *([("   " if long_words else "  ", "text"), *warming] if warming else [])]
    gpu_words = _watched_gpus(run, conditions)
    throttled, names_gpus = _throttled(conditions, long_words, gpu_words)
    each_step, each_sample = _energy(conditions, "" if names_gpus else gpu_words)
    throttled = [*_no_reading_line(indexes), ("  ", "text"), *throttled] if indexes else throttled
    clock, degrees = _clock(conditions), _temperature(run, conditions, long_words)
    energy = [*each_step, *each_sample] if long_words else each_sample
    layouts = (
        (throttled, clock, energy, degrees, warming),
        (throttled, clock, each_sample, degrees, warming),
        (throttled, energy, degrees, warming),
        (throttled, energy, warming),
        (throttled, warming),
        (throttled,),
    )
    return first_fitting([_joined(parts, "   " if long_words else "  ") for parts in layouts], width)


def _joined(parts: Iterable[Line], gap: str) -> Line:
    """Return the parts that are not empty as one line."""
    line: Line = []
    for part in filter(None, parts):
        line += [(gap, "text"), *part] if line else part
    return line


def steadiness(run: RunSnapshot, *, short: bool = False) -> Line:
    """Return words for a drift of temperature and step time, now or at the end; empty if the steps are too few."""
    steady = run.steady
    if steady.still_warming is None:
        return []
    if not steady.still_warming:
        # A live run may drift again.
        return [("steady so far" if run.is_live else "steady", "success")]
    # Importing the runner's diagnosis would delay the first frame, which has no steps.
    from trainfast_runner.results.distributions import drift_text, is_cooling_down

    slope = steady.temperature_slope_c_per_min
    if short:
        return [("still cooling" if is_cooling_down(slope) else "still warming", "warning")]
    return [(f"{drift_text(slope)}{'' if run.is_live else ' at the end'}", "warning")]


def _no_reading_line(indexes: Sequence[int | None]) -> Line:
    return [(f"no reading of GPU {', '.join(map(str, indexes))}", "warning")]


def _throttled(conditions: Sequence[StepConditions], long_words: bool, gpu_words: str) -> tuple[Line, bool]:
    """Return the throttled milliseconds of a step by cause, and True if the line names the GPUs as `gpu_words`.

    If there are several devices, it names the most throttled of each cause.
    """
    read_ms = [
        (shade, ms)
        for shade in SHADES
        if (ms := mean_of_known(step.throttled_ms.get(shade.cause) for step in conditions)) is not None
    ]
    if not read_ms:
        return [("throttling unknown", "muted")], False
    begin: Line = [(f"{gpu_words}: ", "muted")] if gpu_words and long_words else []
    throttled = [(shade, ms) for shade, ms in read_ms if ms >= MIN_THROTTLED_MS]
    if not throttled:
        return [*begin, ("not throttled", "success")], bool(begin)
    line: Line = []
    for index, (shade, ms) in enumerate(throttled):
        line += [(f"{'  ' if index else ''}{shade.letter} ", shade.tone), (fmt.milliseconds(ms), "text")]
        worst = worst_gpu(conditions, shade.cause)
        line += [("" if worst is None else f" (GPU {worst})", "muted")]
    if not long_words:
        return line, False
    return [*(begin or [("throttled ", "muted")]), *line, (" a step", "muted")], bool(begin)


def _clock(conditions: Sequence[StepConditions]) -> Line:
    loss = mean_of_known(step.clock_loss_fraction for step in conditions)
    if loss is None:
        return []
    return [("clock at maximum" if loss < MIN_CLOCK_LOSS else f"clock -{fmt.fraction(loss)}", "text")]


def _energy(conditions: Sequence[StepConditions], gpu_words: str) -> tuple[Line, Line]:
    """Return joules per step and per sample; the second names the GPUs if nothing else does."""
    per_step, per_sample = (
        mean_of_known(step.energy_joules for step in conditions),
        mean_of_known(step.joules_per_sample for step in conditions),
    )
    if per_step is None:
        return [], []
    mark: Line = [(f" ({gpu_words})", "muted")] if gpu_words else []
    return [(f"{fmt.joules(per_step)}/step, ", "text")], [(f"{fmt.joules(per_sample)}/sample", "text"), *mark]


def _watched_gpus(run: RunSnapshot, conditions: Sequence[StepConditions]) -> str:
    """Name the GPUs that a CPU run only watches: their energy did not train its samples."""
    if run.run_file is None or run.run_file.device_uuids:
        return ""
    from trainfast_runner.results.doubts import watched_gpus

    return watched_gpus([device.index for device in conditions[-1].devices])


def _temperature(run: RunSnapshot, conditions: Sequence[StepConditions], long_words: bool) -> Line:
    """Return the temperature at the newest step of a live run, or at the start of an ended one."""
    if run.result is None:
        degrees, time_words = conditions[-1].temperature_c, " now"
    else:
        degrees, time_words = run.result.conditions.start_temperature_c, " at start"
    return [] if degrees is None else [(fmt.celsius(degrees) + (time_words if long_words else ""), "text")]


SEVERITY_TONES: dict[str, Tone] = {"warning": "warning", "info": "secondary"}


class DiagnosisLine(ShownRunWidget):
    """The worst bottleneck in one line; hidden before the first step."""

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

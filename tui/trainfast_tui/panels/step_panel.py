"""The lines about the run: progress, throughput, phases, loss, memory, devices during its steps, worst bottleneck."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from trainfast_runner.errors import mean_of_known
from trainfast_tui.live import figures as live_figures
from trainfast_tui.painting import ShownRunWidget
from trainfast_tui.text import format as fmt
from trainfast_tui.text.device_lines import bar, stacked_cells
from trainfast_tui.text.diagnosis_words import no_bottleneck_in_run
from trainfast_tui.text.event_words import SHADES
from trainfast_tui.text.format import DOUBT_SIGN, PHASE_TONES, SYNTHETIC_BADGE, Line, Tone, packed
from trainfast_tui.text.keys import key_of
from trainfast_tui.text.memory_words import against_predicted_memory, peak_word_of

if TYPE_CHECKING:
    from trainfast_runner.results.device_conditions import StepConditions
    from trainfast_runner.running.follower import RunSnapshot


PHASE_GLYPHS = {"data": "░", "forward": "█", "backward": "▓", "optimizer": "▒", "other": "·"}
SHORT_PHASES = {"optimizer": "optim", "backward": "back", "forward": "fwd"}
"""Names of phases where there is little room."""
FIRST_COLUMN_CELLS = 19
"""Cells of the first figure of each line, without the space after it."""
SHORT_COLUMN_CELLS = 17
"""Cells from one rate to the next where there is little room."""


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
        figures, is_doubtful = live_figures.run_figures(run), run.result is not None and bool(run.result.doubts)
        watched = [conditions_line(run, width)] if has_conditions(run) else []
        return [
            _progress_line(run, width),
            _speed_line(figures, width, is_doubtful=is_doubtful),
            _loss_and_memory_line(run, width),
            *watched,
            *_phase_lines(figures.phases, width),
        ]


def _progress_line(run: RunSnapshot, width: int) -> Line:
    steps_done, planned = (run.steps[-1].step if run.steps else 0), live_figures.planned_steps(run)
    share = steps_done / planned if planned else None
    left_s = live_figures.seconds_left(run)
    if run.is_live:
        end = f"{fmt.duration(left_s)} left" if left_s is not None else ""
    else:
        seconds_taken = run.result.seconds if run.result is not None else None
        end = f"took {fmt.duration(seconds_taken)}" if seconds_taken is not None else ""
    words, label = live_figures.step_words(run), f" {fmt.fraction(share)}  {end}"
    return [(f"{words} ", "title"), *bar(share, max(4, width - len(words) - 1 - len(label))), (label, "text")]


def _speed_line(figures: live_figures.Figures, width: int, *, is_doubtful: bool) -> Line:
    long_words = width >= LONG_STEP_WORDS_FROM
    rate = f"{DOUBT_SIGN} " * is_doubtful + fmt.per_second(figures.samples_per_s, "samples")
    tone: Tone = "warning" if is_doubtful else "muted" if figures.warming_up else "title"
    tokens = fmt.per_second(figures.tokens_per_s, "tokens")
    entries: list[Line] = [
        [(rate, tone)],
        [("of warm-up" if figures.warming_up and not long_words else tokens, "text")],
        [(f"{fmt.milliseconds(figures.step_ms)}{' a step' if long_words else ''}", "text")],
        [(figures.basis if long_words else "", "muted")],
    ]
    return packed(entries, width, gap=1, stop=FIRST_COLUMN_CELLS + 1 if long_words else SHORT_COLUMN_CELLS)[0]


def _loss_and_memory_line(run: RunSnapshot, width: int) -> Line:
    (first, last), peak = live_figures.first_and_last_loss(run), live_figures.peak_allocated_bytes(run)
    line: Line = [
        (f"{f'loss {fmt.number(first)} → {fmt.number(last)}':<{FIRST_COLUMN_CELLS}} ", "text"),
        (f"peak {peak_word_of(run.run_file)} ", "muted"),
        (fmt.size(peak), "text"),
    ]
    predicted = live_figures.predicted_peak_bytes(run)
    if width >= LONG_STEP_WORDS_FROM and (course := loss_course([step.loss for step in run.steps])):
        line.insert(1, (f"{course}  ", "accent"))
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


LOSS_CELLS, BARS = 12, "▁▂▃▄▅▆▇█"


def loss_course(losses: Sequence[float | None]) -> str:
    """Return the losses as bars over time, each the mean of equally many; empty before there are two."""
    known = [loss for loss in losses if loss is not None]
    cells = min(LOSS_CELLS, len(known))
    if cells < 2:
        return ""
    means = [fmean(known[len(known) * cell // cells : len(known) * (cell + 1) // cells]) for cell in range(cells)]
    low, span = min(means), (max(means) - min(means)) or 1.0
    return "".join(BARS[round((mean - low) / span * (len(BARS) - 1))] for mean in means)


def _phase_lines(phases: dict[str, float | None], width: int) -> list[Line]:
    """Return a stacked bar and its legend, on a narrow screen with short names in two lines."""
    if not any(phases.values()):
        return []
    cells = stacked_cells([phases[name] or 0.0 for name in PHASE_GLYPHS], width)
    stacked: Line = [
        (glyph * count, PHASE_TONES[name]) for (name, glyph), count in zip(PHASE_GLYPHS.items(), cells, strict=True)
    ]
    legend = _legend(phases, {}, width)
    return [stacked, *(legend if len(legend) == 1 else _legend(phases, SHORT_PHASES, width))]


def _legend(phases: dict[str, float | None], names: dict[str, str], width: int) -> list[Line]:
    return packed(
        (
            [
                (f"{glyph} ", PHASE_TONES[phase]),
                (f"{names.get(phase, phase)} ", "muted"),
                (fmt.milliseconds(phases[phase]), "text"),
            ]
            for phase, glyph in PHASE_GLYPHS.items()
        ),
        width,
    )


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
    conditions, long_words = live_figures.counted_steps(run), width >= LONG_STEP_WORDS_FROM
    warming = steadiness(run, short=not long_words)
    if not conditions:
        return warming
    per_step = mean_of_known(step.energy_joules for step in conditions)
    per_sample = mean_of_known(step.joules_per_sample for step in conditions)
    step_words = f"{fmt.joules(per_step)}/step, " if long_words else ""
    energy: Line = [] if per_step is None else [(f"{step_words}{fmt.joules(per_sample)}/sample", "text")]
    parts = [_throttled(conditions, long_words, _watched_gpus(run, conditions)), warming, _clock(conditions), energy]
    return packed(filter(None, parts), width, gap=3 if long_words else 2)[0]


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


def _throttled(conditions: Sequence[StepConditions], long_words: bool, gpu_words: str) -> Line:
    """Return the throttled milliseconds of a step by cause, after the GPUs that a run on the CPU only watches.

    If there are several devices, the line names the most throttled of each cause.
    """
    read_ms = [
        (shade, ms)
        for shade in SHADES
        if (ms := mean_of_known(step.throttled_ms.get(shade.cause) for step in conditions)) is not None
    ]
    line: Line = [(f"{gpu_words}: ", "muted")] if gpu_words else []
    throttled = [(shade, ms) for shade, ms in read_ms if ms >= MIN_THROTTLED_MS]
    if not throttled:
        return [*line, ("not throttled", "success") if read_ms else ("throttling unknown", "muted")]
    line = line or [("throttled " if long_words else "", "muted")]
    for index, (shade, ms) in enumerate(throttled):
        line += [(f"{'  ' if index else ''}{shade.letter} ", shade.tone), (fmt.milliseconds(ms), "text")]
        worst = live_figures.worst_gpu(conditions, shade.cause)
        line += [("" if worst is None else f" (GPU {worst})", "muted")]
    return [*line, (" a step" if long_words else "", "muted")]


def _clock(conditions: Sequence[StepConditions]) -> Line:
    loss = mean_of_known(step.clock_loss_fraction for step in conditions)
    if loss is None:
        return []
    return [("clock at maximum" if loss < MIN_CLOCK_LOSS else f"clock -{fmt.fraction(loss)}", "text")]


def _watched_gpus(run: RunSnapshot, conditions: Sequence[StepConditions]) -> str:
    """Name the GPUs that a CPU run only watches: their energy did not train its samples."""
    if run.run_file is None or run.run_file.device_uuids:
        return ""
    from trainfast_runner.results.doubts import watched_gpus

    return watched_gpus([device.index for device in conditions[-1].devices])


RULES_OF_DOUBTS = {
    "other_processes": "host-cpu",
    "heat": "thermal",
    "power_brake": "power-brake",
    "shared_gpu": "foreign-process",
}
"""The rule whose line says the same as a doubt, by the kind of the doubt."""
SEVERITY_TONES: dict[str, Tone] = {"warning": "warning", "info": "secondary"}


class DiagnosisLine(ShownRunWidget):
    """The worst bottleneck in one line; hidden before the first step."""

    def show_run(self, run: RunSnapshot | None) -> None:
        """Show this run's worst bottleneck."""
        self.set_class(run is not None and bool(run.steps), "-shown")
        super().show_run(run)

    def lines(self, width: int, height: int) -> list[Line]:
        return [] if self._run is None else [worst_bottleneck(self._run)]


def worst_bottleneck(run: RunSnapshot) -> Line:
    """Return the worst bottleneck that no doubt above names, in one line, or that none was found."""
    if not run.diagnosis:
        return [(no_bottleneck_in_run(run), "muted")]
    doubts, key = () if run.result is None else run.result.doubts or (), key_of("main", "diagnosis")
    doubted = {RULES_OF_DOUBTS.get(doubt.kind) for doubt in doubts}
    worst, other_count = next((one for one in run.diagnosis if one.rule not in doubted), None), len(run.diagnosis) - 1
    if worst is None:
        return [(f"{key} ", "key"), ("what to try against the doubt", "muted")]
    return [
        (f"{key} ", "key"),
        (worst.line, SEVERITY_TONES.get(worst.severity, "text")),
        (f"  and {other_count} more" if other_count else "", "muted"),
    ]

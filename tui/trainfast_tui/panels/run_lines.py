"""One line about the devices during a run's steps: throttled time by cause, clocks, energy, temperature."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec

from trainfast_runner.errors import mean_of_known
from trainfast_tui.live.figures import counted_steps, silent_gpus, worst_gpu
from trainfast_tui.painting import ShownRunWidget
from trainfast_tui.text import format as fmt
from trainfast_tui.text.diagnosis_words import no_bottleneck_in_run
from trainfast_tui.text.event_words import SHADES
from trainfast_tui.text.format import Line, Tone, first_fitting
from trainfast_tui.text.keys import key_of

if TYPE_CHECKING:
    from trainfast_runner.results.device_conditions import StepConditions
    from trainfast_runner.running.follower import RunSnapshot


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
    mark = steadiness(run)
    warming: Line = [(mark.words if long_words else mark.short_words, mark.tone)] if mark is not None else []
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


class Steadiness(msgspec.Struct, frozen=True):
    """A drift of temperature and step time, or its absence, in words."""

    words: str
    short_words: str
    tone: Tone


def steadiness(run: RunSnapshot) -> Steadiness | None:
    """Return words for a drift of temperature and step time, now or at the end; None if the steps are too few."""
    steady = run.steady
    if steady.still_warming is None:
        return None
    if steady.still_warming:
        # Importing the runner's diagnosis would delay the first frame, which has no steps.
        from trainfast_runner.results.steady_state import drift_text, is_cooling_down

        slope = steady.temperature_slope_c_per_min
        words, short_words = drift_text(slope), "still cooling" if is_cooling_down(slope) else "still warming"
        return Steadiness(words if run.is_live else f"{words} at the end", short_words, "warning")
    # A live run may drift again.
    words = f"steady {'so far, ' if run.is_live else ''}from step {steady.steady_from_step}"
    return Steadiness(words, words, "success")


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

"""The phases of a step of each run: a table of medians, and a bar for each run."""

from __future__ import annotations

from collections.abc import Sequence

from trainfast_runner.worker.shared.phases import STEP_PHASES
from trainfast_tui.report.blocks import Block, Heading, Prose, as_blocks, filled_grid
from trainfast_tui.report.pictures import StackedBar, StackedPart, stacked_picture
from trainfast_tui.report.reported_run import ReportedRun
from trainfast_tui.text.format import ABSENT, count, milliseconds
from trainfast_tui.text.signs import PHASE_TONES
from trainfast_tui.text.speed_words import few_steps_note
from trainfast_tui.text.tables import figure_headings


def phase_blocks(runs: Sequence[ReportedRun]) -> list[Block]:
    """Return the median phases of a step, and percentiles of the whole."""
    if not any(run.result.steps.measured for run in runs):
        return [Heading("Phases of a step"), Prose("No step was measured.")]
    header = ("", *figure_headings("steps", "step p50", "p90", "p99", *STEP_PHASES))
    table = filled_grid(header, map(_row, runs))
    bars = [_bar(run) for run in runs if any(getattr(run.result.step_ms, name) is not None for name in STEP_PHASES)]
    picture = stacked_picture("phases of a step", "milliseconds, medians of the measured steps", bars, milliseconds)
    notes = [] if bars else [Prose("No phase of a step was measured.")]
    return [Heading("Phases of a step"), table, *notes, *as_blocks(picture)]


def _row(run: ReportedRun) -> list[str]:
    times, measured = run.result.step_ms, run.result.steps.measured
    tail = [milliseconds(times.p90), milliseconds(times.p99)]
    if few := few_steps_note(measured):
        tail = [few, few]
    return [run.label, count(measured), milliseconds(times.p50), *tail, *(_phase(run, name) for name in STEP_PHASES)]


def _phase(run: ReportedRun, name: str) -> str:
    """Return the median of a phase with its deviation, if there is one."""
    value, mad = getattr(run.result.step_ms, name), run.result.step_ms.mad.get(name)
    if value is None:
        return ABSENT
    return milliseconds(value) + (f" (MAD {milliseconds(mad)})" if mad is not None else "")


def _bar(run: ReportedRun) -> StackedBar:
    times = run.result.step_ms
    parts = [
        StackedPart(name, value, PHASE_TONES[name])
        for name in STEP_PHASES
        if (value := getattr(times, name)) is not None
    ]
    return StackedBar(f"run {run.label}", tuple(parts), f"{milliseconds(times.p50)} in all")

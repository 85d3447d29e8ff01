"""Memory of each run: the predicted peak of each phase by category, beside the measured peak."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trainfast_runner.memory.prediction import CATEGORIES
from trainfast_runner.worker.shared.phases import MEMORY_PHASES
from trainfast_tui.report.blocks import Block, Heading, Prose, as_blocks, filled_grid
from trainfast_tui.report.pictures import StackedBar, StackedPart, stacked_picture
from trainfast_tui.report.reported_run import ReportedRun
from trainfast_tui.text.format import ABSENT, percent_change, signed_percent, size
from trainfast_tui.text.memory_words import category_words, phase_words, short_category
from trainfast_tui.text.tables import figure_headings

# A picture has no signs beside its tones, as the screen has: each category needs a tone of its own.
TONE_OF_CATEGORY = dict(zip(CATEGORIES, ("primary", "secondary", "accent", "success", "warning", "error"), strict=True))
WHOLE_STEP = "whole step"
ONE_FIGURE = (
    "A prediction has categories; an allocator's peak is one figure, measured as a whole for each phase of a step"
    " where the run recorded that, else for the whole step."
)


def memory_blocks(runs: Sequence[ReportedRun]) -> list[Block]:
    """Return the table and the bars; a sentence if nothing was predicted or measured."""
    rows: list[list[str]] = []
    bars: list[StackedBar] = []
    for run in runs:
        for phase, predicted, measured in _peaks(run):
            rows.append(_row(run, phase, predicted, measured))
            bars += _bars(run, phase, predicted, measured)
    if not rows:
        return [Heading("Memory"), Prose("No peak was predicted, and none was measured.")]
    figures = figure_headings(*map(short_category, CATEGORIES), "predicted", "measured", "difference")
    picture = stacked_picture("memory at its peak, a rank", "bytes at the peak of the phase", bars, size, binary=True)
    blocks: list[Block] = [Heading("Memory"), filled_grid(("", "phase", *figures), rows), Prose(ONE_FIGURE)]
    missing = [f"{run.label}: not measured: {why}" for run in runs if (why := run.result.memory.not_measured_because)]
    return [*blocks, *map(Prose, missing), *as_blocks(picture)]


def _peaks(run: ReportedRun) -> Iterator[tuple[str, dict[str, int], int | None]]:
    """Yield each phase's predicted bytes by category with the measured peak, then the whole step if only that is known.

    The predicted bytes are empty without a prediction.
    """
    by_phase, measured = run.run_file.predicted_phases if run.run_file is not None else {}, _measured(run)
    for phase in MEMORY_PHASES:
        if by_phase.get(phase) or phase in measured:
            yield (
                phase,
                {name: by_phase.get(phase, {}).get(name, 0) for name in CATEGORIES if phase in by_phase},
                measured.get(phase),
            )
    memory = run.result.memory
    if not measured and (memory.peak_allocated_bytes is not None or (memory.predicted_bytes and not by_phase)):
        predicted = run.run_file.predicted_parts if run.run_file is not None else {}
        parts = {name: predicted[f"{name}_bytes"] for name in CATEGORIES if f"{name}_bytes" in predicted}
        yield WHOLE_STEP, parts, memory.peak_allocated_bytes


def _measured(run: ReportedRun) -> dict[str, int]:
    """Return the highest peak of each phase on any rank."""
    highest: dict[str, int] = {}
    for steps in run.records.steps.values():
        for step in steps:
            for phase, peak in (step.phase_peaks or {}).items():
                highest[phase] = max(highest.get(phase, 0), peak)
    return highest


def _row(run: ReportedRun, phase: str, predicted: dict[str, int], measured: int | None) -> list[str]:
    total = sum(predicted.values())
    parts = [size(predicted[name]) if name in predicted else ABSENT for name in CATEGORIES]
    return [
        run.label,
        phase_words(phase),
        *parts,
        size(total) if predicted else ABSENT,
        size(measured),
        signed_percent(percent_change(measured, total)),
    ]


def _bars(run: ReportedRun, phase: str, predicted: dict[str, int], measured: int | None) -> Iterator[StackedBar]:
    phase_title = phase_words(phase).removeprefix("the ")
    if any(predicted.values()):
        parts = [StackedPart(category_words(name), value, TONE_OF_CATEGORY[name]) for name, value in predicted.items()]
        yield StackedBar(f"{run.label}: {phase_title}", tuple(parts), f"{size(sum(predicted.values()))} predicted")
    if measured is not None:
        part = StackedPart("measured", measured, "muted")
        yield StackedBar(f"{run.label}: {phase_title}", (part,), f"{size(measured)} measured")

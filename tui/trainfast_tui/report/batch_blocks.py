"""A batch search as blocks of a report: its question, its answer, the sizes tried, and the fit through their peaks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trainfast_runner.records.run_states import state_text
from trainfast_runner.search.batch.batch_follower import BatchSnapshot
from trainfast_runner.search.journal.batch import (
    BatchEnded,
    BatchQuestion,
    ConfirmationRun,
    Probe,
    refuted_by,
)
from trainfast_runner.units import counted
from trainfast_tui.report.blocks import Block, Grid, Heading, Prose, as_blocks, filled_grid, pairs_grid
from trainfast_tui.report.export_blocks import export_blocks
from trainfast_tui.report.machine_blocks import machine_blocks
from trainfast_tui.report.pictures import Axis, PicturePoint, PointKind, ScatterLine, scatter_picture
from trainfast_tui.report.reported_run import ReportedRun
from trainfast_tui.report.run_blocks import ABSENT_NOTE, changes_grid, run_sections
from trainfast_tui.text.format import count, duration, milliseconds, number, size, with_sizes
from trainfast_tui.text.search.batch_answer import batch_answer_rows
from trainfast_tui.text.search.outcomes import OUTCOMES, REFUTED, outcome_of
from trainfast_tui.text.tables import FigureHeading, figure_headings

POINT_KINDS = {
    "fits": PointKind(OUTCOMES["fits"].noun, "o", "success"),
    "oom": PointKind(OUTCOMES["oom"].noun, "x", "error"),
    REFUTED: PointKind(OUTCOMES[REFUTED].noun, "o", "warning", is_open=True),
    "confirmation": PointKind("confirmation run", "s", "primary"),
}
CONFIRMATION_POINTS = {"finished": "confirmation", "oom": "oom"}
"""Keys of `POINT_KINDS` by the state of a confirmation run; one that ended otherwise says nothing of memory."""
FIT_POINTS = 40
"""Points through which the fit is drawn: it bends where another phase becomes the highest."""


def batch_confirming_run_ids(search: BatchSnapshot) -> list[str]:
    """Return the id of the run that confirmed the answer; empty without one."""
    answer = search.answer
    return [answer.confirmation_run_id] if answer is not None and answer.confirmation_run_id is not None else []


def batch_search_report(search: BatchSnapshot, question: BatchQuestion, runs: Sequence[ReportedRun]) -> list[Block]:
    """Return the whole report; `runs` has the confirmation run if it is still on the disk."""
    blocks: list[Block] = [*_question(search, question), *(machine_blocks(runs) if runs else ())]
    blocks += [Heading("Answer"), *_answer(search)]
    blocks += [Heading("Sizes tried"), _attempts_grid(search.probes, search.confirmations), Prose(ABSENT_NOTE)]
    picture = scatter_picture(
        "peak memory by batch size",
        list(_points(search.probes, search.confirmations)),
        list(_lines(search, question)),
        Axis("batch size, samples a rank", number),
        Axis("peak memory of the tightest rank", size, binary=True),
    )
    blocks += as_blocks(picture)
    if not runs:
        return [*blocks, Prose("No confirmation run is on the disk, so there is no machine, chart or export here.")]
    exports = export_blocks(runs)
    answer = search.answer
    if answer is not None and answer.recommended_batch not in (None, answer.max_batch):
        exports.insert(1, Prose(f"They have the largest batch; the recommended one is {answer.recommended_batch:,}."))
    return [*blocks, *run_sections(runs), *exports]


def _question(search: BatchSnapshot, question: BatchQuestion) -> Iterator[Block]:
    limit = question.lowest_limit_bytes
    limit_words = f" within {size(limit)} a rank ({question.limit_words})" if limit is not None else ""
    ranks = counted(question.world_size, "process", "processes")
    yield Prose(f"How large a batch of {question.name} fits on {question.device} in {ranks}{limit_words}?")
    if question.title:
        yield Prose(f"{question.name}: {question.title}.")
    predicted = search.prediction
    if predicted is not None and predicted.max_batch is not None:
        yield Prose(f"Predicted: up to {count(predicted.max_batch)} ({predicted.basis}).")
    elif predicted is not None and predicted.reason:
        yield Prose(f"Not predicted: {predicted.reason}.")


def _answer(search: BatchSnapshot) -> Iterator[Block]:
    ended = search.ended
    if ended is None:
        yield Prose("The search has no answer yet: the same command continues it.")
    elif ended.answer is not None:
        yield pairs_grid("", batch_answer_rows(search, ended.answer))
    else:
        yield from _without_answer(ended)


def _without_answer(ended: BatchEnded) -> Iterator[Block]:
    """Yield the reason, the missing bytes, and the changes that would make a batch of 1 fit."""
    yield Prose(f"{state_text(ended.state).capitalize()}: {ended.reason}.")
    if ended.missing_bytes is not None:
        yield Prose(f"At least {size(ended.missing_bytes)} are missing.")
    if ended.changes:
        yield changes_grid(ended.changes)


def _attempts_grid(probes: Sequence[Probe], confirmations: Sequence[ConfirmationRun]) -> Grid:
    """Return every probe and confirmation run, in the order they were made."""
    figures = figure_headings("peak", "reserved", "samples/s", "step", "took")
    header = (FigureHeading("batch size"), "in", "outcome", *figures, "run", "reason")
    attempts: list[Probe | ConfirmationRun] = [*probes, *confirmations]
    rows = [_attempt_row(attempt, confirmations) for attempt in sorted(attempts, key=lambda attempt: attempt.t_ns)]
    return filled_grid(header, rows)


def _attempt_row(attempt: Probe | ConfirmationRun, confirmations: Sequence[ConfirmationRun]) -> list[str]:
    if isinstance(attempt, Probe):
        refuting = refuted_by(attempt, confirmations)
        outcome = outcome_of(attempt.outcome).noun + (f", refuted by {refuting.run_id}" if refuting is not None else "")
        kind, reserved = "probe", attempt.peak_reserved_bytes
    else:
        kind, outcome, reserved = "confirmation run", state_text(attempt.state), None
    memory = [size(attempt.peak_allocated_bytes), size(reserved)]
    times = [number(attempt.samples_per_s), milliseconds(attempt.step_ms), duration(attempt.seconds)]
    return [count(attempt.batch_size), kind, outcome, *memory, *times, attempt.run_id, with_sizes(attempt.reason)]


def _points(probes: Sequence[Probe], confirmations: Sequence[ConfirmationRun]) -> Iterator[PicturePoint]:
    for probe in probes:
        outcome = REFUTED if refuted_by(probe, confirmations) is not None else probe.outcome
        if probe.peak_allocated_bytes is not None and outcome in POINT_KINDS:
            yield _point(probe.batch_size, probe.peak_allocated_bytes, outcome)
    for confirmation in confirmations:
        if confirmation.peak_allocated_bytes is not None and confirmation.state in CONFIRMATION_POINTS:
            point_kind = CONFIRMATION_POINTS[confirmation.state]
            yield _point(confirmation.batch_size, confirmation.peak_allocated_bytes, point_kind)


def _point(batch_size: int, peak_bytes: int, outcome: str) -> PicturePoint:
    words = f"batch size {count(batch_size)}: {size(peak_bytes)}, {POINT_KINDS[outcome].words}"
    return PicturePoint(batch_size, peak_bytes, POINT_KINDS[outcome], words)


def _lines(search: BatchSnapshot, question: BatchQuestion) -> Iterator[ScatterLine]:
    """Yield the fit of the tightest rank, and the limit."""
    largest = max((probe.batch_size for probe in search.probes), default=1)
    fit = search.tightest_fit
    if fit is not None and fit.lines:
        sizes = [largest * n / FIT_POINTS for n in range(FIT_POINTS + 1)]
        yield ScatterLine(
            tuple((batch_size, fit.need_bytes(batch_size)) for batch_size in sizes), "fit, the highest phase", "primary"
        )
    limit = fit.limit_bytes if fit is not None else question.lowest_limit_bytes
    if limit is not None:
        yield ScatterLine(((0, limit), (largest, limit)), f"limit {size(limit)}", "error", "--")

"""A search as blocks of a report: its question, its answer, everything tried, and pictures of memory and speed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median

from trainfast_runner.records.run_directory import state_text
from trainfast_runner.search.batch_journal import (
    BatchAnswer,
    BatchEnded,
    BatchQuestion,
    BatchSnapshot,
    ConfirmationRun,
    Probe,
    refuted_by,
)
from trainfast_runner.search.best.answer import BestSoFar, verdicts_without_answer
from trainfast_runner.search.best_journal import BestAnswer, BestEnded, BestQuestion, CandidateVerdict, ColdRun, Trial
from trainfast_runner.units import counted
from trainfast_tui.charts.scatter_chart import drawn_limit
from trainfast_tui.report import pictures
from trainfast_tui.report.blocks import Block, Grid, Heading, Prose, as_blocks, filled_grid, pairs_grid
from trainfast_tui.report.run_blocks import (
    ABSENT_NOTE,
    ReportedRun,
    changes_grid,
    export_blocks,
    machine_blocks,
    run_sections,
)
from trainfast_tui.text.batch_words import batch_answer_rows
from trainfast_tui.text.best_words import (
    EFFECT_HEADER,
    best_answer_rows,
    candidate_text,
    count_rows,
    effect_rows,
    objective_of,
)
from trainfast_tui.text.format import (
    ABSENT,
    FigureHeading,
    count,
    duration,
    figure_headings,
    interval,
    milliseconds,
    number,
    percent,
    signed_percent,
    size,
    with_sizes,
)
from trainfast_tui.text.result_words import value_text
from trainfast_tui.text.search_words import OUTCOMES, REFUTED, outcome_of, role_of

POINT_KINDS = {
    "fits": pictures.PointKind(OUTCOMES["fits"].noun, "o", "success"),
    "oom": pictures.PointKind(OUTCOMES["oom"].noun, "x", "error"),
    REFUTED: pictures.PointKind(OUTCOMES[REFUTED].noun, "o", "warning", is_open=True),
    "confirmation": pictures.PointKind("confirmation run", "s", "primary"),
}
CONFIRMATION_POINTS = {"finished": "confirmation", "oom": "oom"}
"""Keys of `POINT_KINDS` by the state of a confirmation run; one that ended otherwise says nothing of memory."""
FIT_POINTS = 40
"""Points through which the fit is drawn: it bends where another phase becomes the highest."""


def batch_search_report(search: BatchSnapshot, question: BatchQuestion, runs: Sequence[ReportedRun]) -> list[Block]:
    """Return the whole report; `runs` has the confirmation run if it is still on the disk."""
    blocks: list[Block] = [*_batch_question(search, question), *(machine_blocks(runs) if runs else ())]
    ended, answer = search.ended, search.answer
    blocks += _answer(ended, () if answer is None else batch_answer_rows(search, answer))
    if ended is not None and ended.changes:
        blocks.append(changes_grid(ended.changes))
    blocks += [Heading("Sizes tried"), _attempts_grid(search.probes, search.confirmations), Prose(ABSENT_NOTE)]
    picture = pictures.scatter_picture(
        "peak memory by batch size",
        list(_points(search.probes, search.confirmations)),
        list(_lines(search, question)),
        pictures.Axis("batch size, samples a rank", number),
        pictures.Axis("peak memory of the tightest rank", size, binary=True),
    )
    blocks += as_blocks(picture)
    if not runs:
        return [*blocks, Prose("No confirmation run is on the disk, so there is no machine, chart or export here.")]
    exports = export_blocks(runs)
    if answer is not None and answer.recommended_batch not in (None, answer.max_batch):
        exports.insert(1, Prose(f"They have the largest batch; the recommended one is {answer.recommended_batch:,}."))
    return [*blocks, *run_sections(runs), *exports]


def _batch_question(search: BatchSnapshot, question: BatchQuestion) -> Iterator[Block]:
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


def _answer(ended: BatchEnded | BestEnded | None, rows: Iterable[tuple[str, str]]) -> Iterator[Block]:
    """Yield the rows of the answer, after the reason for which the search has none or stopped before it was final."""
    yield Heading("Answer")
    if ended is None:
        yield Prose("The search has no answer yet: the same command continues it.")
        return
    if ended.state != "answered":
        best = "; the best so far" if ended.answer is not None else ""
        yield Prose(f"{state_text(ended.state).capitalize()}: {ended.reason}{best}.")
    if ended.missing_bytes is not None:
        yield Prose(f"At least {size(ended.missing_bytes)} are missing.")
    if listed := tuple(rows):
        yield pairs_grid("", listed)


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


def _points(probes: Sequence[Probe], confirmations: Sequence[ConfirmationRun]) -> Iterator[pictures.PicturePoint]:
    for probe in probes:
        outcome = REFUTED if refuted_by(probe, confirmations) is not None else probe.outcome
        if probe.peak_allocated_bytes is not None and outcome in POINT_KINDS:
            yield _point(probe.batch_size, probe.peak_allocated_bytes, outcome)
    for confirmation in confirmations:
        if confirmation.peak_allocated_bytes is not None and confirmation.state in CONFIRMATION_POINTS:
            point_kind = CONFIRMATION_POINTS[confirmation.state]
            yield _point(confirmation.batch_size, confirmation.peak_allocated_bytes, point_kind)


def _point(batch_size: int, peak_bytes: int, outcome: str) -> pictures.PicturePoint:
    words = f"batch size {count(batch_size)}: {size(peak_bytes)}, {POINT_KINDS[outcome].words}"
    return pictures.PicturePoint(batch_size, peak_bytes, POINT_KINDS[outcome], words)


def _lines(search: BatchSnapshot, question: BatchQuestion) -> Iterator[pictures.ScatterLine]:
    """Yield the fit of the tightest rank, and the limit."""
    largest = max((probe.batch_size for probe in search.probes), default=1)
    fit = search.tightest_fit
    if fit is not None and fit.lines:
        sizes = [largest * n / FIT_POINTS for n in range(FIT_POINTS + 1)]
        yield pictures.ScatterLine(
            tuple((batch_size, fit.need_bytes(batch_size)) for batch_size in sizes), "fit, the highest phase", "primary"
        )
    limit = fit.limit_bytes if fit is not None else question.lowest_limit_bytes
    if limit is not None:
        yield pictures.ScatterLine(((0, limit), (largest, limit)), f"limit {size(limit)}", "error", "--")


NO_EXPORT = "No run of the best setting is on the disk: its settings are not exported."


def confirming_run_ids(answer: BatchAnswer | BestAnswer | None) -> list[str]:
    """Return the ids of the runs that confirmed the answer, the baseline's first; empty without any."""
    if isinstance(answer, BestAnswer):
        return list(dict.fromkeys([*answer.baseline_run_ids, *answer.best_run_ids]))
    return [] if answer is None or answer.confirmation_run_id is None else [answer.confirmation_run_id]


def best_search_report(so_far: BestSoFar, question: BestQuestion, runs: Sequence[ReportedRun]) -> list[Block]:
    """Return the whole report; `runs` are those of `confirming_run_ids` that are still on the disk."""
    blocks: list[Block] = [*_best_question(question), *(machine_blocks(runs) if runs else ())]
    answer, space = so_far.answer, so_far.space
    rows: list[tuple[str, str]] = []
    if answer is not None and space is not None:
        rows = [*best_answer_rows(so_far, answer), *count_rows(so_far, answer.verdicts)]
    blocks += _answer(so_far.ended, rows)
    if rows:
        blocks.append(Prose("Intervals are confidence intervals of 95 %."))
    if answer is not None:
        blocks += [*search_pareto_blocks(so_far, answer), *_effects(answer), *_verdicts(so_far, answer.verdicts)]
    elif verdicts := verdicts_without_answer(so_far.lines):
        blocks += _verdicts(so_far, verdicts)
    blocks += _trial_blocks(so_far)
    if not runs:
        return [*blocks, Prose("No run that confirmed an answer is on the disk: no machine, chart or export here.")]
    is_baseline = answer is not None and space is not None and answer.best_number == space.baseline_number
    winner = [run for run in runs if answer is not None and run.directory.name in answer.best_run_ids]
    return [
        *blocks,
        Prose(_roles(runs, winner, is_baseline)),
        *run_sections(runs),
        *(export_blocks(winner[:1]) if winner else [Prose(NO_EXPORT)]),
    ]


def _roles(runs: Sequence[ReportedRun], winner: Sequence[ReportedRun], is_baseline: bool) -> str:
    others = [run.label for run in runs if run not in winner]
    best = "the best, which is the baseline" if is_baseline else "the best"
    sides = [(others, "the baseline"), ([run.label for run in winner], best)]
    return (
        "; ".join(f"{' and '.join(run_labels)}: {side}, in a fresh process" for run_labels, side in sides if run_labels)
        + "."
    )


def _best_question(question: BestQuestion) -> Iterator[Block]:
    limit = question.lowest_limit_bytes
    fits = f" within {size(limit)} a rank" if limit is not None else ""
    names = f" ({', '.join(question.device_names)})" if question.device_names else ""
    objective = objective_of(question.objective)
    yield Prose(f"Which settings train {question.name} {objective.best} on {question.device}{names} and fit{fits}?")
    if question.title:
        yield Prose(f"{question.name}: {question.title}.")
    steps = f" ({counted(question.for_steps, 'step')})" if question.for_steps is not None else ""
    rows = [("judged by", objective.judged_by + steps)]
    batch = "free" if question.global_batch is None else counted(question.global_batch, "sample")
    rows += [("global batch", batch), ("budget", duration(question.budget_s))]
    rows += [
        (f"{name} varied", ", ".join(value_text(name, value) for value in values))
        for name, values in question.vary.items()
    ]
    rows += [(f"{name} left alone", reason) for name, reason in question.left_alone.items()]
    yield pairs_grid("", rows)


def _effects(answer: BestAnswer) -> Iterator[Block]:
    if not answer.effects:
        return
    yield Heading("Gain of each knob")
    yield filled_grid(EFFECT_HEADER, effect_rows(answer))
    whiskers = []
    for effect in answer.effects:
        before, value = value_text(effect.knob, effect.before), value_text(effect.knob, effect.value)
        gain = effect.gain_percent
        words = signed_percent(gain.median)
        tone = "success" if gain.low > 0 else "error" if gain.high < 0 else "muted"
        whiskers.append(
            pictures.Whisker(f"{effect.knob}: {before} to {value}", gain.low, gain.median, gain.high, words, tone)
        )
    title, axis = "gain of each value over the baseline's", "percent, with the 95 % CI"
    yield from as_blocks(pictures.whisker_picture(title, axis, whiskers, percent))


def _verdicts(so_far: BestSoFar, verdicts: Sequence[CandidateVerdict]) -> Iterator[Block]:
    yield Heading("Every setting")
    header = (FigureHeading(""), "settings", "verdict", *figure_headings("samples/s", "predicted", "peak"), "reason")
    rows = []
    for verdict in verdicts:
        candidate = so_far.candidate(verdict.candidate_number)
        memory = [size(candidate.predicted_bytes), size(so_far.peak_bytes(verdict.candidate_number))]
        rate = ABSENT
        if verdict.rate is not None:
            rate = f"{number(verdict.rate.median)} (95 % CI: {interval(verdict.rate.low, verdict.rate.high)})"
        words = [verdict.verdict.replace("_", " "), rate, *memory, with_sizes(verdict.reason)]
        rows.append([count(verdict.candidate_number), candidate_text(so_far, verdict.candidate_number), *words])
    yield filled_grid(header, rows)
    yield Prose(ABSENT_NOTE)


def _trial_blocks(so_far: BestSoFar) -> Iterator[Block]:
    """Yield the trials and the cold runs, in their order."""
    yield Heading("Trials and runs")
    rows = [_trial_row(so_far, attempt) for attempt in so_far.attempts]
    if not rows:
        yield Prose("Nothing was measured.")
        return
    figures = figure_headings("samples/s", "predicted (90 %)", "step", "steps", "peak", "took")
    yield filled_grid(("settings", "as", "outcome", *figures, "run", "reason"), rows)


def _trial_row(so_far: BestSoFar, attempt: Trial | ColdRun) -> list[str]:
    if isinstance(attempt, Trial):
        # Each trial of a script is a process of its own.
        is_alone = so_far.question is not None and so_far.question.is_script
        role = "trial" if is_alone else "warm trial" if attempt.warm else "first trial of a process"
        role += ", repeated" if attempt.repeats else ""
        step_ms = median(attempt.step_ms) if attempt.step_ms else None
        rate = 1e3 * attempt.samples_per_step / step_ms if step_ms else None
        times = [number(rate), ABSENT, milliseconds(step_ms), count(len(attempt.step_ms))]
    else:
        knob = f" of {attempt.knob}" if attempt.knob else ""
        role, speed = f"{role_of(attempt.role).noun}{knob}", attempt.predicted
        predicted = f"{number(speed.median)} ({interval(speed.low, speed.high)})" if speed else ABSENT
        times = [number(attempt.samples_per_s), predicted, ABSENT, ABSENT]
    return [
        candidate_text(so_far, attempt.candidate_number),
        role,
        outcome_of(attempt.outcome).noun,
        *times,
        size(attempt.peak_allocated_bytes),
        duration(attempt.seconds),
        attempt.run_id,
        with_sizes(attempt.reason),
    ]


BEST = pictures.PointKind("best", "s", "success")
BASELINE = pictures.PointKind("baseline", "^", "secondary")


def search_pareto_blocks(so_far: BestSoFar, answer: BestAnswer) -> list[Block]:
    """Return the picture and the table of the front; a sentence if no candidate has both figures."""
    heading = Heading("Memory against throughput")
    measured = _measured(so_far, answer)
    points = [
        pictures.PicturePoint(
            peak,
            rate,
            _kind(candidate, so_far, answer),
            f"{candidate_text(so_far, candidate)}: {number(rate)} samples/s with {size(peak)}",
        )
        for candidate, (peak, rate) in measured.items()
    ]
    front = sorted((*measured[candidate], candidate) for candidate in answer.pareto_numbers if candidate in measured)
    limit_bytes = so_far.limit_bytes
    shown_limit = drawn_limit(limit_bytes, max((peak for peak, _ in measured.values()), default=0))
    lines = list(_front_line([(peak, rate) for peak, rate, _ in front]))
    if shown_limit is not None:
        lines.append(_limit_line(shown_limit, measured))
    title = "throughput by peak memory of each measured setting"
    x_axis, y_axis = pictures.Axis("peak memory, a rank", size, binary=True), pictures.Axis("samples/s", number)
    picture = pictures.scatter_picture(title, points, lines, x_axis, y_axis)
    if picture is None:
        return [heading, Prose("No setting has both a measured throughput and a measured peak.")]
    rows = [
        (count(candidate), candidate_text(so_far, candidate), number(rate), size(peak))
        for peak, rate, candidate in front
    ]
    return [
        heading,
        picture,
        *(
            [Prose(f"The limit, {size(limit_bytes)}, is far right of the picture.")]
            if limit_bytes != shown_limit
            else []
        ),
        Prose("On the front no other setting is faster with less memory:"),
        filled_grid((FigureHeading(""), "settings", *figure_headings("samples/s", "peak memory")), rows),
    ]


def _measured(so_far: BestSoFar, answer: BestAnswer) -> dict[int, tuple[int, float]]:
    """Return the highest peak in bytes and the samples/s of each candidate that has both, by its number."""
    return {
        verdict.candidate_number: (peak, verdict.rate.median)
        for verdict in answer.verdicts
        if verdict.rate is not None and (peak := so_far.peak_bytes(verdict.candidate_number)) is not None
    }


def _kind(candidate: int, so_far: BestSoFar, answer: BestAnswer) -> pictures.PointKind:
    if candidate == answer.best_number:
        return BEST
    if so_far.space is not None and candidate == so_far.space.baseline_number:
        return BASELINE
    return pictures.ON_FRONT if candidate in answer.pareto_numbers else pictures.BEHIND_FRONT


def _front_line(front: list[tuple[int, float]]) -> Iterator[pictures.ScatterLine]:
    """Yield the front, by rising peak, as steps; a single candidate has no line."""
    if len(front) > 1:
        points: list[tuple[float, float]] = [front[0]]
        for peak, rate in front[1:]:
            points += [(peak, points[-1][1]), (peak, rate)]
        yield pictures.ScatterLine(tuple(points), "front", "primary", ":")


def _limit_line(limit_bytes: int, measured: Mapping[int, tuple[int, float]]) -> pictures.ScatterLine:
    highest = max((rate for _, rate in measured.values()), default=0.0)
    return pictures.ScatterLine(((limit_bytes, 0), (limit_bytes, highest)), f"limit {size(limit_bytes)}", "error", "--")

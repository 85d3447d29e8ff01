"""A best-fit search as blocks of a report: its question, its answer, the candidates, and the gain of each knob."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from trainfast_runner.records.run_states import state_text
from trainfast_runner.search.best.best_so_far import BestSoFar
from trainfast_runner.search.best.choose.answer import verdicts_without_answer
from trainfast_runner.search.journal.best import (
    BestAnswer,
    BestQuestion,
    CandidateVerdict,
    ColdRun,
    Trial,
)
from trainfast_runner.units import counted
from trainfast_tui.report.blocks import Block, Heading, Prose, as_blocks, filled_grid, pairs_grid
from trainfast_tui.report.export_blocks import export_blocks
from trainfast_tui.report.machine_blocks import machine_blocks
from trainfast_tui.report.pictures import Whisker, whisker_picture
from trainfast_tui.report.reported_run import ReportedRun
from trainfast_tui.report.run_blocks import ABSENT_NOTE, run_sections
from trainfast_tui.report.search_pareto_blocks import search_pareto_blocks
from trainfast_tui.text.comparison_words import value_text
from trainfast_tui.text.format import (
    ABSENT,
    count,
    duration,
    interval,
    milliseconds,
    number,
    percent,
    signed_percent,
    size,
    with_sizes,
)
from trainfast_tui.text.search.best_answer import EFFECT_HEADER, best_answer_rows, count_rows, effect_rows
from trainfast_tui.text.search.best_figures import gain_text, objective_of, typed_knobs
from trainfast_tui.text.search.outcomes import outcome_of, role_of
from trainfast_tui.text.tables import FigureHeading, figure_headings

NO_EXPORT = "No run of the best setting is on the disk: its settings are not exported."


def best_confirming_run_ids(so_far: BestSoFar) -> list[str]:
    """Return the ids of the runs that confirmed the answer, the baseline's first; empty without an answer."""
    answer = so_far.answer
    return [] if answer is None else list(dict.fromkeys([*answer.baseline_run_ids, *answer.best_run_ids]))


def best_search_report(so_far: BestSoFar, question: BestQuestion, runs: Sequence[ReportedRun]) -> list[Block]:
    """Return the whole report; `runs` are those of `best_confirming_run_ids` that are still on the disk."""
    blocks: list[Block] = [*_question(question), *(machine_blocks(runs) if runs else ())]
    blocks += [Heading("Answer"), *_answer(so_far)]
    answer = so_far.answer
    if answer is not None:
        blocks += [*search_pareto_blocks(so_far, answer), *_effects(answer), *_verdicts(so_far, answer.verdicts)]
    elif verdicts := verdicts_without_answer(so_far.lines):
        blocks += _verdicts(so_far, verdicts)
    blocks += _attempt_blocks(so_far)
    if not runs:
        return [*blocks, Prose("No run that confirmed an answer is on the disk: no machine, chart or export here.")]
    space = so_far.space
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


def _question(question: BestQuestion) -> Iterator[Block]:
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
    if question.earlier:
        yield Prose("Effects that earlier searches found on this device, as a start:")
        earlier = [
            (
                effect.knob,
                value_text(effect.knob, effect.before),
                value_text(effect.knob, effect.value),
                gain_text(effect.gain_percent),
                effect.search_id,
            )
            for effect in question.earlier
        ]
        yield filled_grid(("knob", "from", "to", FigureHeading("gain"), "search"), earlier)


def _answer(so_far: BestSoFar) -> Iterator[Block]:
    ended, answer = so_far.ended, so_far.answer
    if ended is None:
        yield Prose("The search has no answer yet: the same command continues it.")
        return
    if ended.state != "answered":
        best = "; the best so far" if answer is not None else ""
        yield Prose(f"{state_text(ended.state).capitalize()}: {ended.reason}{best}.")
    if ended.missing_bytes is not None:
        yield Prose(f"At least {size(ended.missing_bytes)} are missing.")
    if answer is not None and so_far.space is not None:
        yield pairs_grid("", [*best_answer_rows(so_far, answer), *count_rows(so_far, answer.verdicts)])
        yield Prose("Intervals are confidence intervals of 95 %.")


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
        whiskers.append(Whisker(f"{effect.knob}: {before} to {value}", gain.low, gain.median, gain.high, words, tone))
    title, axis = "gain of each value over the baseline's", "percent, with the 95 % CI"
    yield from as_blocks(whisker_picture(title, axis, whiskers, percent))


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
        rows.append([count(verdict.candidate_number), typed_knobs(candidate.knobs), *words])
    yield filled_grid(header, rows)
    yield Prose(ABSENT_NOTE)


def _attempt_blocks(so_far: BestSoFar) -> Iterator[Block]:
    """Yield the trials and the cold runs, in their order."""
    yield Heading("Trials and runs")
    rows = [_attempt_row(so_far, attempt) for attempt in so_far.attempts]
    if not rows:
        yield Prose("Nothing was measured.")
        return
    figures = figure_headings("samples/s", "predicted (90 %)", "step", "steps", "peak", "took")
    yield filled_grid(("settings", "as", "outcome", *figures, "run", "reason"), rows)


def _attempt_row(so_far: BestSoFar, attempt: Trial | ColdRun) -> list[str]:
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
        typed_knobs(so_far.candidate(attempt.candidate_number).knobs),
        role,
        outcome_of(attempt.outcome).noun,
        *times,
        size(attempt.peak_allocated_bytes),
        duration(attempt.seconds),
        attempt.run_id,
        with_sizes(attempt.reason),
    ]

"""The document of a report: of runs, or of one search with its question, its answer and every size or setting tried."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from string import ascii_uppercase

from trainfast_runner.errors import UserError
from trainfast_runner.memory.oom import with_newer_explanation
from trainfast_runner.records.home import Home, is_conducted, search_directories
from trainfast_runner.records.run_directory import state_text
from trainfast_runner.running.settling import final_result
from trainfast_runner.search.batch_journal import (
    BatchAnswer,
    BatchEnded,
    BatchFollower,
    BatchQuestion,
    BatchSnapshot,
    ConfirmationRun,
    Probe,
    refuted_by,
)
from trainfast_runner.search.best.answer import BestSoFar, verdicts_without_answer
from trainfast_runner.search.best_journal import (
    BestAnswer,
    BestEnded,
    BestQuestion,
    CandidateVerdict,
    read_best_journal,
)
from trainfast_runner.units import counted
from trainfast_tui.report.blocks import Block, Document, Heading, Prose, filled_grid, pairs_grid
from trainfast_tui.report.run_blocks import (
    ABSENT_NOTE,
    ReportedRun,
    changes_grid,
    export_blocks,
    read_run,
    run_sections,
    runs_report,
)
from trainfast_tui.text.batch_words import batch_answer_rows
from trainfast_tui.text.best_words import (
    EFFECT_HEADER,
    PARETO_HEADER,
    best_answer_rows,
    candidate_text,
    count_rows,
    effect_rows,
    objective_of,
    pareto_rows,
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
    size,
    with_sizes,
)
from trainfast_tui.text.result_words import value_text
from trainfast_tui.text.search_words import REFUTED, outcome_of


def report_document(home: Home, references: Sequence[str]) -> tuple[Document, list[str]]:
    """Return the report of these runs, or of the one search, and the ids of the runs in it. Raises UserError."""
    searches = {directory.name: directory for directory in search_directories(home)}
    ids = list(dict.fromkeys(home.find(reference, list(searches)) for reference in references))
    search_ids = [listed_id for listed_id in ids if listed_id in searches]
    if search_ids and len(ids) > 1:
        raise UserError(
            "a report covers several runs or exactly one search", key=search_ids[0], advice=f"{search_ids[0]} alone"
        )
    if search_ids:
        return _search_document(home, searches[search_ids[0]])
    runs = _read_runs(home, ids)
    names = " and ".join(dict.fromkeys(run.result.name for run in runs))
    title = f"{names}: {ids[0]}" if len(runs) == 1 else f"{names}: {len(runs)} runs"
    return Document(title, tuple(runs_report(runs))), ids


def _search_document(home: Home, directory: Path) -> tuple[Document, list[str]]:
    """Return the report of a search of either kind, with the runs that confirmed its answer."""
    best, batch = BestSoFar(tuple(read_best_journal(directory))), BatchFollower(directory).poll()
    confirmed = confirming_run_ids(batch.answer if best.question is None else best.answer)
    run_ids = [run_id for run_id in confirmed if home.directory(run_id).is_dir()]
    runs = _read_runs(home, run_ids)
    if best.question is not None:
        kind, blocks = "Best-fit search", best_search_report(best, best.question, runs)
    elif batch.question is not None:
        kind, blocks = "Batch search", batch_search_report(batch, batch.question, runs)
    else:
        raise UserError(f"the journal of {directory.name} has no readable question", key=directory.name)
    if is_conducted(directory):
        blocks.insert(0, Prose("The search is still running: this is its journal so far."))
    return Document(f"{kind} {directory.name}", tuple(blocks)), run_ids


def _read_runs(home: Home, run_ids: Sequence[str]) -> list[ReportedRun]:
    """Return the runs with all their records, labelled A, B, C and so on; raises UserError if one is running."""
    runs = []
    for run_id, label in zip(run_ids, _labels(len(run_ids)), strict=True):
        directory = home.directory(run_id)
        result = with_newer_explanation(directory, final_result(home, run_id, "the report"))
        runs.append(read_run(label, directory, result))
    return runs


def _labels(count: int) -> list[str]:
    """Return A, B, C and so on, as in `runs compare`; numbers when there are more runs than letters."""
    return list(ascii_uppercase[:count]) if count <= len(ascii_uppercase) else [str(n) for n in range(1, count + 1)]


def confirming_run_ids(answer: BatchAnswer | BestAnswer | None) -> list[str]:
    """Return the ids of the runs that confirmed the answer, the baseline's first; empty without any."""
    if isinstance(answer, BestAnswer):
        return list(dict.fromkeys([*answer.baseline_run_ids, *answer.best_run_ids]))
    return [] if answer is None or answer.confirmation_run_id is None else [answer.confirmation_run_id]


def batch_search_report(search: BatchSnapshot, question: BatchQuestion, runs: Sequence[ReportedRun]) -> list[Block]:
    """Return the whole report; `runs` has the confirmation run if it is still on the disk."""
    limit, answer, ended = question.lowest_limit_bytes, search.answer, search.ended
    limit_words = f" within {size(limit)} a rank ({question.limit_words})" if limit is not None else ""
    ranks = counted(question.world_size, "process", "processes")
    words = f"How large a batch of {question.name} fits on {question.device} in {ranks}{limit_words}?"
    blocks: list[Block] = [Prose(words), *_title(question)]
    if (predicted := search.prediction) is not None and predicted.max_batch is not None:
        blocks.append(Prose(f"Predicted: up to {count(predicted.max_batch)} ({predicted.basis})."))
    blocks += _answer(ended, () if answer is None else batch_answer_rows(search, answer))
    if ended is not None and ended.changes:
        blocks.append(changes_grid(ended.changes))
    attempts: list[Probe | ConfirmationRun] = [*search.probes, *search.confirmations]
    attempts.sort(key=lambda attempt: attempt.t_ns)
    figures = figure_headings("peak", "samples/s", "step", "took")
    header = (FigureHeading("batch size"), "in", "outcome", *figures, "run", "reason")
    rows = [_attempt_row(attempt, search.confirmations) for attempt in attempts]
    blocks += [Heading("Sizes tried"), filled_grid(header, rows), Prose(ABSENT_NOTE)]
    if not runs:
        return [*blocks, Prose("No confirmation run is on the disk, so there is no machine, chart or export here.")]
    exports = list(export_blocks(runs))
    if answer is not None and answer.recommended_batch not in (None, answer.max_batch):
        exports.insert(1, Prose(f"They have the largest batch; the recommended one is {answer.recommended_batch:,}."))
    return [*blocks, *run_sections(runs), *exports]


def _title(question: BatchQuestion | BestQuestion) -> list[Block]:
    return [Prose(f"{question.name}: {question.title}.")] if question.title else []


def _answer(ended: BatchEnded | BestEnded | None, rows: Iterable[tuple[str, str]]) -> Iterator[Block]:
    """Yield the rows of the answer, after the reason there is none or that it is not final."""
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
        yield pairs_grid(listed)


def _attempt_row(attempt: Probe | ConfirmationRun, confirmations: Sequence[ConfirmationRun]) -> list[str]:
    if isinstance(attempt, ConfirmationRun):
        kind, outcome = "confirmation run", state_text(attempt.state)
    else:
        is_refuted = refuted_by(attempt, confirmations) is not None
        kind, outcome = "probe", outcome_of(REFUTED if is_refuted else attempt.outcome).noun
    figures = [size(attempt.peak_allocated_bytes), number(attempt.samples_per_s), milliseconds(attempt.step_ms)]
    ended = [duration(attempt.seconds), attempt.run_id, with_sizes(attempt.reason)]
    return [count(attempt.batch_size), kind, outcome, *figures, *ended]


def best_search_report(so_far: BestSoFar, question: BestQuestion, runs: Sequence[ReportedRun]) -> list[Block]:
    """Return the whole report; `runs` are those of `confirming_run_ids` that are still on the disk."""
    answer, space = so_far.answer, so_far.space
    blocks: list[Block] = list(_best_question(question))
    verdicts = answer.verdicts if answer is not None else verdicts_without_answer(so_far.lines)
    rows: list[tuple[str, str]] = []
    if answer is not None and space is not None:
        rows = [*best_answer_rows(so_far, answer), *count_rows(so_far, answer.verdicts)]
    blocks += _answer(so_far.ended, rows)
    if answer is not None:
        blocks.append(Prose("Intervals are confidence intervals of 95 %."))
        if answer.pareto_numbers:
            blocks.append(filled_grid(PARETO_HEADER, pareto_rows(so_far, answer)))
        if answer.effects:
            blocks += [Heading("Gain of each knob"), filled_grid(EFFECT_HEADER, effect_rows(answer))]
    if verdicts:
        header = (
            FigureHeading(""),
            "settings",
            "verdict",
            *figure_headings("samples/s", "predicted", "peak"),
            "reason",
        )
        table = filled_grid(header, [_verdict_row(so_far, verdict) for verdict in verdicts])
        blocks += [Heading("Every setting"), table, Prose(ABSENT_NOTE)]
    if not runs:
        return [*blocks, Prose("No run that confirmed an answer is on the disk: no machine, chart or export here.")]
    winner = [run for run in runs if answer is not None and run.directory.name in answer.best_run_ids]
    labels = " and ".join(run.label for run in winner)
    blocks += [*([Prose(f"{labels}: the best, in a fresh process.")] if winner else []), *run_sections(runs)]
    no_export = Prose("No run of the best setting is on the disk: its settings are not exported.")
    return [*blocks, *(export_blocks(winner[:1]) if winner else [no_export])]


def _best_question(question: BestQuestion) -> Iterator[Block]:
    limit, objective = question.lowest_limit_bytes, objective_of(question.objective)
    fits = f" within {size(limit)} a rank" if limit is not None else ""
    names = f" ({', '.join(question.device_names)})" if question.device_names else ""
    yield Prose(f"Which settings train {question.name} {objective.best} on {question.device}{names} and fit{fits}?")
    yield from _title(question)
    steps = f" ({counted(question.for_steps, 'step')})" if question.for_steps is not None else ""
    batch = "free" if question.global_batch is None else counted(question.global_batch, "sample")
    yield pairs_grid(
        [
            ("judged by", objective.judged_by + steps),
            ("global batch", batch),
            ("budget", duration(question.budget_s)),
            *((f"{name} varied", ", ".join(value_text(name, one) for one in of)) for name, of in question.vary.items()),
            *((f"{name} left alone", reason) for name, reason in question.left_alone.items()),
        ]
    )


def _verdict_row(so_far: BestSoFar, verdict: CandidateVerdict) -> list[str]:
    candidate, rate = verdict.candidate_number, ABSENT
    if verdict.rate is not None:
        rate = f"{number(verdict.rate.median)} (95 % CI: {interval(verdict.rate.low, verdict.rate.high)})"
    memory = [size(so_far.candidate(candidate).predicted_bytes), size(so_far.peak_bytes(candidate))]
    words = [candidate_text(so_far, candidate), verdict.verdict.replace("_", " "), rate]
    return [count(candidate), *words, *memory, with_sizes(verdict.reason)]

"""The report of runs, or of one search with its question, its answer and every size or setting tried."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from dataclasses import replace as replaced_struct
from pathlib import Path
from string import ascii_uppercase

from msgspec.structs import replace

from trainfast_runner.errors import UserError
from trainfast_runner.machine.telemetry.throttle import CAUSES
from trainfast_runner.memory.oom import with_newer_explanation
from trainfast_runner.memory.timeline import CATEGORIES
from trainfast_runner.records.capped_file import RecordTail
from trainfast_runner.records.home import Home, is_conducted, search_directories
from trainfast_runner.records.json_lines import even_share, one_in, remaining_records
from trainfast_runner.records.result import OomChange, Result
from trainfast_runner.records.run_directory import TELEMETRY_FILE, RunRecords, notable_reason, read_records, state_text
from trainfast_runner.records.run_file import RunFile
from trainfast_runner.records.tick import Tick
from trainfast_runner.results.comparison import DIFFERENT_SAMPLE_VERDICTS, compare, compared_conditions
from trainfast_runner.results.doubts import doubts
from trainfast_runner.results.verdict import mismatches
from trainfast_runner.running.follower import Follower, Rates, RunSnapshot, SummedRates
from trainfast_runner.running.settling import final_result
from trainfast_runner.search.batch_journal import BatchEnded, BatchQuestion, BatchSnapshot, ConfirmationRun, Probe
from trainfast_runner.search.best.answer import BestSoFar
from trainfast_runner.search.best_journal import BestEnded, BestQuestion, CandidateVerdict
from trainfast_runner.settings.device_counts import ranks_with_samples
from trainfast_runner.settings.spec import without_search_settings
from trainfast_runner.units import counted
from trainfast_tui.charts.chart_data import ChartData, TimeAxis
from trainfast_tui.charts.charted import cpu_charts, device_charts, has_gpu_samples, reading_names, throughput_chart
from trainfast_tui.live.snapshot import Snapshot, used_uuids
from trainfast_tui.report.blocks import Block, Document, grid, heading, listing, pairs_grid, prose
from trainfast_tui.report.pictures import strip_picture, throttled_sentences
from trainfast_tui.text import best_words, memory_words
from trainfast_tui.text import format as fmt
from trainfast_tui.text.batch_words import batch_answer_rows
from trainfast_tui.text.diagnosis_words import no_bottleneck_in_result
from trainfast_tui.text.format import ABSENT, FigureHeading
from trainfast_tui.text.next_run_words import few_steps_note, typed_overrides
from trainfast_tui.text.result_words import figure_rows, interval_text, result_notes, value_text
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
    best, batch = BestSoFar.read(directory), BatchSnapshot.read(directory)
    if (answer := best.answer) is not None:
        confirmed = list(dict.fromkeys([*answer.baseline_run_ids, *answer.best_run_ids]))
    else:
        run_id = batch.answer.confirmation_run_id if batch.answer is not None else None
        confirmed = [] if run_id is None else [run_id]
    run_ids = [run_id for run_id in confirmed if home.directory(run_id).is_dir()]
    runs = _read_runs(home, run_ids)
    if best.question is not None:
        kind, blocks = "Best-fit search", _best_blocks(best, best.question)
    elif batch.question is not None:
        kind, blocks = "Batch search", _batch_blocks(batch, batch.question)
    else:
        raise UserError(f"the journal of {directory.name} has no readable question", key=directory.name)
    live = [prose("The search is still running: this is its journal so far.")] if is_conducted(directory) else []
    no_runs = prose("No run that confirmed an answer is on the disk, so there is no machine or chart here.")
    of_runs = run_sections(runs) if runs else [no_runs]
    return Document(f"{kind} {directory.name}", (*live, *blocks, prose(ABSENT_NOTE), *of_runs)), run_ids


def _read_runs(home: Home, run_ids: Sequence[str]) -> list[ReportedRun]:
    """Return the runs with all their records, labelled A, B, C and so on; raises UserError if one is running."""
    runs = []
    for place, run_id in enumerate(run_ids):
        directory = home.directory(run_id)
        result = with_newer_explanation(directory, final_result(home, run_id, "the report"))
        label = ascii_uppercase[place] if place < len(ascii_uppercase) else str(place + 1)
        runs.append(read_run(label, directory, result))
    return runs


def _batch_blocks(search: BatchSnapshot, question: BatchQuestion) -> Iterator[Block]:
    """Yield the question of a batch search, its answer and the sizes tried."""
    limit, answer, ended = question.lowest_limit_bytes, search.answer, search.ended
    limit_words = f" within {fmt.size(limit)} a rank ({question.limit_words})" if limit is not None else ""
    ranks = counted(question.world_size, "process", "processes")
    yield prose(f"How large a batch of {question.name} fits on {question.device} in {ranks}{limit_words}?")
    yield from _title(question)
    if (predicted := search.prediction) is not None and predicted.max_batch is not None:
        yield prose(f"Predicted: up to {fmt.count(predicted.max_batch)} ({predicted.basis}).")
    yield from _answer(ended, [] if answer is None else [*batch_answer_rows(search, answer)])
    if ended is not None and ended.changes:
        yield changes_grid(ended.changes)
    attempts: list[Probe | ConfirmationRun] = [*search.probes, *search.confirmations]
    figures = fmt.figure_headings("peak", "samples/s", "step", "took")
    header = (FigureHeading("batch size"), "in", "outcome", *figures, "run", "reason")
    yield heading("Sizes tried")
    yield grid(header, [_attempt_row(one, search) for one in sorted(attempts, key=lambda one: one.t_ns)])


def _title(question: BatchQuestion | BestQuestion) -> list[Block]:
    return [prose(f"{question.name}: {question.title}.")] if question.title else []


def _answer(ended: BatchEnded | BestEnded | None, rows: Sequence[tuple[str, str]]) -> Iterator[Block]:
    """Yield the rows of the answer, after the reason there is none or that it is not final."""
    yield heading("Answer")
    if ended is None:
        yield prose("The search has no answer yet: the same command continues it.")
        return
    if ended.state != "answered":
        best = "; the best so far" if ended.answer is not None else ""
        yield prose(f"{state_text(ended.state).capitalize()}: {ended.reason}{best}.")
    if ended.missing_bytes is not None:
        yield prose(f"At least {fmt.size(ended.missing_bytes)} are missing.")
    if rows:
        yield pairs_grid(rows)


def _attempt_row(attempt: Probe | ConfirmationRun, search: BatchSnapshot) -> list[str]:
    if isinstance(attempt, ConfirmationRun):
        kind, outcome = "confirmation run", state_text(attempt.state)
    else:
        is_refuted = search.refuted_by(attempt) is not None
        kind, outcome = "probe", outcome_of(REFUTED if is_refuted else attempt.outcome).noun
    figures = [
        fmt.size(attempt.peak_allocated_bytes),
        fmt.number(attempt.samples_per_s),
        fmt.milliseconds(attempt.step_ms),
    ]
    ended = [fmt.duration(attempt.seconds), attempt.run_id, fmt.with_sizes(attempt.reason)]
    return [fmt.count(attempt.batch_size), kind, outcome, *figures, *ended]


def _best_blocks(so_far: BestSoFar, question: BestQuestion) -> Iterator[Block]:
    """Yield the question of a best-fit search, its answer and the verdict on every setting."""
    limit, objective = question.lowest_limit_bytes, best_words.objective_of(question.objective)
    fits = f" within {fmt.size(limit)} a rank" if limit is not None else ""
    names = f" ({', '.join(question.device_names)})" if question.device_names else ""
    yield prose(f"Which settings train {question.name} {objective.best} on {question.device}{names} and fit{fits}?")
    yield from _title(question)
    steps = f" ({counted(question.for_steps, 'step')})" if question.for_steps is not None else ""
    batch = "free" if question.global_batch is None else counted(question.global_batch, "sample")
    yield pairs_grid(
        [
            ("judged by", objective.judged_by + steps),
            ("global batch", batch),
            ("budget", fmt.duration(question.budget_s)),
            *((f"{name} varied", ", ".join(value_text(name, one) for one in of)) for name, of in question.vary.items()),
            *((f"{name} left alone", reason) for name, reason in question.left_alone.items()),
        ]
    )
    answer = so_far.answer
    rows: list[tuple[str, str]] = []
    if answer is not None and so_far.space is not None:
        rows = [*best_words.best_answer_rows(so_far, answer), *best_words.count_rows(so_far)]
    yield from _answer(so_far.ended, rows)
    if answer is not None:
        yield prose("Intervals are confidence intervals of 95 %.")
        if answer.pareto_numbers:
            yield grid(best_words.PARETO_HEADER, best_words.pareto_rows(so_far, answer))
        if answer.effects:
            yield heading("Gain of each knob")
            yield grid(best_words.EFFECT_HEADER, best_words.effect_rows(answer))
    if so_far.verdicts:
        figures = fmt.figure_headings("samples/s", "predicted", "peak")
        yield heading("Every setting")
        header = (FigureHeading(""), "settings", "verdict", *figures, "reason")
        yield grid(header, [_verdict_row(so_far, verdict) for verdict in so_far.verdicts])


def _verdict_row(so_far: BestSoFar, verdict: CandidateVerdict) -> list[str]:
    candidate, rate = verdict.candidate_number, ABSENT
    if verdict.rate is not None:
        rate = f"{fmt.number(verdict.rate.median)} (95 % CI: {fmt.interval(verdict.rate.low, verdict.rate.high)})"
    memory = [fmt.size(so_far.candidate(candidate).predicted_bytes), fmt.size(so_far.peak_bytes(candidate))]
    words = [best_words.candidate_text(so_far, candidate), verdict.verdict.replace("_", " "), rate]
    return [fmt.count(candidate), *words, *memory, fmt.with_sizes(verdict.reason)]


ABSENT_NOTE = f"{ABSENT} stands for a figure that was not measured."
MOST_TICK_BYTES = 16 << 20
"""Records of the samples in a chart, three hours of one GPU: a picture is 300 columns wide."""


@dataclass(frozen=True)
class ReportedRun:
    """A run that has ended, as a report shows it; `label` names it in tables."""

    label: str
    directory: Path
    result: Result
    records: RunRecords
    snapshot: RunSnapshot

    @property
    def run_file(self) -> RunFile | None:
        """`run.json`; None if it cannot be read."""
        return self.snapshot.run_file

    @property
    def origin_ns(self) -> int:
        """CLOCK_MONOTONIC at which the run was started, or of its first record if that is unknown."""
        if self.run_file is not None:
            return self.run_file.clock.monotonic_ns
        return min((series[0].t_ns for series in (self.snapshot.ticks, self.snapshot.steps) if series), default=0)


def read_run(label: str, directory: Path, result: Result) -> ReportedRun:
    """Read the whole run: unlike a screen, a report shows more than the newest steps and samples."""
    records = read_records(directory)
    snapshot = Follower(directory).poll()
    whole_snapshot = replaced_struct(snapshot, run_file=records.run, ticks=_ticks(directory), rates=_rates(records))
    return ReportedRun(label, directory, result, records, whole_snapshot)


def _ticks(directory: Path) -> tuple[Tick, ...]:
    """Return the machine's samples, thinned evenly for a long run; empty if the file cannot be read."""
    path = directory / TELEMETRY_FILE
    try:
        ticks = enumerate(remaining_records(RecordTail(path, Tick)))
        return tuple(even_share(ticks, one_in([path], MOST_TICK_BYTES)))
    except OSError:
        return ()


def _rates(records: RunRecords) -> Rates:
    """Return the throughput of each step that all data-parallel ranks wrote, summed over them."""
    ranks = 1 if records.run is None else ranks_with_samples(records.run)
    summed = SummedRates(keep=None)
    for rank, steps in records.steps.items():
        summed.add(rank, steps, ranks)
    return summed.rates()


def runs_report(runs: Sequence[ReportedRun]) -> list[Block]:
    """Return the whole report of one run or more; the others are compared with the first."""
    names = list(dict.fromkeys(run.result.name for run in runs))
    question = f"How fast does {names[0]} train with these settings, with how much memory, and what slows it?"
    if len(runs) > 1:
        question = f"How do {len(runs)} runs of {' and '.join(names)} differ? Each is compared with run A, the first."
    titles = dict.fromkeys(
        f"{run.result.name}: {run.run_file.title}." for run in runs if run.run_file is not None and run.run_file.title
    )
    return [prose(question), *map(prose, titles), *run_sections(runs)]


def run_sections(runs: Sequence[ReportedRun]) -> list[Block]:
    """Return the tables of all runs and of the machine, then each run's verdict and charts."""
    blocks: list[Block] = [heading("Runs" if len(runs) > 1 else "The run"), _runs_grid(runs), prose(ABSENT_NOTE)]
    blocks += [*_asked_and_ran(runs), heading("Machine"), _machine_grid(runs)]
    for run in runs:
        blocks += _one_run(run)
    return blocks


def _runs_grid(runs: Sequence[ReportedRun]) -> str:
    """Return a row for each run: settings, throughput with its spread, step, memory, energy, throttling and end."""
    header = ["", "run", "settings", *fmt.figure_headings("samples/s", "MAD"), f"against {runs[0].label}"]
    header += [*fmt.figure_headings("tokens/s", "step", "peak memory", "predicted", "J/sample"), "throttled", "end"]
    return grid(header, (_run_row(run, runs[0]) for run in runs))


def _run_row(run: ReportedRun, first: ReportedRun) -> list[str]:
    result = run.result
    rate, few_note = result.throughput.samples_per_s, few_steps_note(result.steps.measured)
    return [
        run.label,
        result.run_id,
        " ".join(typed_overrides(without_search_settings(result.overrides, result.role))) or "as the preset sets them",
        fmt.number(rate.typical),
        few_note if few_note and rate.typical is not None else fmt.number(rate.mad),
        "" if run is first else _against(first.result, result),
        fmt.number(result.throughput.tokens_per_s.typical),
        fmt.milliseconds(result.step_ms.p50),
        fmt.size(result.memory.peak_allocated_bytes),
        fmt.size(result.memory.predicted_bytes),
        fmt.joules(result.energy.joules_per_sample),
        _throttled_words(result),
        _end_words(result),
    ]


def _throttled_words(result: Result) -> str:
    """Return the throttled share of the measured time by cause, of the worst device; ABSENT if no cause was read."""
    shares = [(cause.text, getattr(result.throttle, f"{cause.name}_fraction")) for cause in CAUSES]
    read_shares = [(words, share) for words, share in shares if share is not None]
    throttled = [f"{fmt.fraction(share, 1)} by {words}" for words, share in read_shares if share]
    return ", ".join(throttled) or ("not throttled" if read_shares else ABSENT)


def _end_words(result: Result) -> str:
    """Return the end state, its reason, and the doubts about the figures."""
    reason = fmt.with_sizes(notable_reason(result.state, result.reason))
    words = f"{state_text(result.state)}: {reason}" if reason else state_text(result.state)
    return "; ".join(filter(None, (words, fmt.doubt_words(doubts(result)))))


def _against(first: Result, result: Result) -> str:
    """Return the difference in throughput, its 95 % interval, and the verdict."""
    row = compare(first, result).rows[0]
    if row.percent is None or row.verdict in DIFFERENT_SAMPLE_VERDICTS:
        return row.verdict
    ci_words = f" (95 % CI: {interval_text(row)})" if row.interval_percent else ""
    return f"{fmt.signed_percent(row.percent)}{ci_words}: {row.verdict}"


def _asked_and_ran(runs: Sequence[ReportedRun]) -> Iterator[Block]:
    """Yield the settings that ran otherwise than asked; a sentence if all ran as asked, nothing without a record."""
    rows = []
    for run in runs:
        for mismatch in mismatches(run.records.run, run.records.worker_lines):
            rows.append((run.label, mismatch.field, str(mismatch.asked), f"{mismatch.ran} (rank {mismatch.rank})"))
        for override in run.result.script.overridden if run.result.script is not None else ():
            ran = "unknown" if override.ran is None else f"{override.ran} (by {override.by})"
            rows.append((run.label, override.knob, str(override.asked), ran))
    if rows:
        yield heading("Asked and ran", 3)
        yield grid(("", "setting", "asked", "ran"), tuple(rows))
    elif any(lines for run in runs for lines in run.records.worker_lines.values()):
        yield prose("Every setting that a rank read from its live objects is the one that was asked for.")


def _machine_grid(runs: Sequence[ReportedRun]) -> Block:
    """Return the facts about the machine, a column for each run."""
    facts = [dict(_facts(run)) for run in runs]
    names = dict.fromkeys(name for of_run in facts for name in of_run)
    if not names:
        return prose("Nothing about the machine is on record.")
    labels = [run.label for run in runs] if len(runs) > 1 else [""]
    return grid(("", *labels), tuple((name, *(of_run.get(name, ABSENT) for of_run in facts)) for name in names))


def _facts(run: ReportedRun) -> Iterator[tuple[str, str]]:
    """Yield each fact on record by name."""
    run_file, result, ticks = run.run_file, run.result, run.snapshot.ticks
    if run_file is not None:
        names = f": {', '.join(run_file.device_names)}" if run_file.device_names else ""
        yield "device", f"{run_file.device}{names}, {counted(run_file.world_size, 'process', 'processes')}"
    if (host := next((tick.host for tick in ticks if tick.host.cpu_count), None)) is not None:
        yield "host", f"{host.cpu_count} CPU cores, {fmt.size(host.memory_total_bytes)}"
    if gpus := dict.fromkeys(device.name for tick in ticks[-1:] for device in tick.devices if device.name):
        yield "GPUs of the machine", ", ".join(gpus)
    if run_file is not None:
        if run_file.link is not None:
            yield "slowest link", run_file.link
        yield from ((name, version) for name, version in run_file.versions.items() if version and name != "driver")
    yield from ((row.label, row.a) for row in compared_conditions(result, result) if row.a is not None)


def _one_run(run: ReportedRun) -> Iterator[Block]:
    result = run.result
    yield heading(f"Run {run.label}: {result.run_id}")
    yield prose(f"{result.name}, {_end_words(result)}, after {fmt.duration(result.seconds)}.")
    yield prose(f"Its settings in the form of another tool: trainfast-tui export {result.run_id} --to FORM.")
    yield pairs_grid([*figure_rows(result), *_predicted_parts(run)])
    if remarks := tuple(result_notes(result)):
        yield listing(remarks)
    if (explanation := result.oom) is not None:
        yield listing(tuple(memory_words.oom_sentences(explanation)))
        if explanation.changes:
            yield prose(f"To make it fit, {memory_words.changes_title(explanation.changes)}")
            yield changes_grid(explanation.changes)
    if result.diagnosis:
        yield listing(tuple(f"{bottleneck.line}. Try: {bottleneck.advice}" for bottleneck in result.diagnosis))
    else:
        yield prose(f"{no_bottleneck_in_result(result)}.".capitalize())
    charts = charts_of(run)
    if throttled := " ".join(throttled_sentences(charts[0], run.origin_ns)):
        yield prose(throttled)
    for chart in charts:
        yield strip_picture(chart, run.origin_ns) or prose(f"{chart.title}: {chart.empty}")


def _predicted_parts(run: ReportedRun) -> Iterator[tuple[str, str]]:
    """Yield the predicted memory by category; nothing without a prediction."""
    predicted = run.run_file.predicted if run.run_file is not None else None
    sizes = {name: size for name in CATEGORIES if predicted is not None and (size := predicted.category(name))}
    if sizes:
        words = [f"{memory_words.category_words(name)} {fmt.size(value)}" for name, value in sizes.items()]
        yield "predicted parts", ", ".join(words)


def changes_grid(changes: Sequence[OomChange]) -> str:
    """Return the changes of knobs that would make a run fit, with their costs."""
    rows = [(memory_words.change_options(change), change.saves, change.costs) for change in changes]
    return grid(("change", "saves", "costs in speed"), rows)


def charts_of(run: ReportedRun) -> list[ChartData]:
    """Return throughput and every device reading over the whole run, with the first measured step marked."""
    rates, ticks, steps = run.snapshot.rates, run.snapshot.ticks, run.snapshot.steps
    ends_ns = [*rates.times_ns[-1:], *(tick.t_ns for tick in ticks[-1:])]
    axis = TimeAxis(run.origin_ns, max(ends_ns, default=run.origin_ns + 1), is_live=False)
    snapshot = Snapshot(taken_ns=axis.end_ns, run=run.snapshot, ticks=(), has_read_home=True)
    throughput = throughput_chart(snapshot, axis, sorted(used_uuids(run.snapshot)))
    charts = [throughput, *device_charts(snapshot, axis, 0, len(reading_names(snapshot)))]
    if has_gpu_samples(snapshot) and run.run_file is not None and run.run_file.device == "cpu":
        # On the screen the charts of watched GPUs replace those of the CPU; a report has both.
        charts += cpu_charts(ticks, axis, has_run=True)
    # A long run's snapshot has only its newest steps, none of them warm-up.
    has_warmup = any(step.warmup for step in steps)
    measured_ns = next((step.begin_ns for step in steps if has_warmup and not step.warmup), None)
    return [replace(chart, cursor_ns=measured_ns) for chart in charts]

"""Runs as blocks of a report: the question, the machine, tables of all runs, and each run's charts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trainfast_runner.machine.telemetry.throttle import CAUSES
from trainfast_runner.records.result import OomChange, Result
from trainfast_runner.records.run_states import notable_reason, state_text
from trainfast_runner.results.asked_and_ran import mismatches
from trainfast_runner.results.comparison.difference import compare
from trainfast_runner.results.comparison.ranking import DIFFERENT_SAMPLE_VERDICTS
from trainfast_runner.results.doubts import doubts
from trainfast_runner.settings.set_by_searches import without_search_settings
from trainfast_tui.report.blocks import Block, Grid, Heading, Listing, Prose, as_blocks, filled_grid, pairs_grid
from trainfast_tui.report.export_blocks import export_blocks
from trainfast_tui.report.machine_blocks import machine_blocks
from trainfast_tui.report.memory_blocks import memory_blocks
from trainfast_tui.report.phase_blocks import phase_blocks
from trainfast_tui.report.pictures import Whisker, strip_picture, whisker_picture
from trainfast_tui.report.reported_run import ReportedRun
from trainfast_tui.report.run_charts import charts_of
from trainfast_tui.report.runs_pareto_blocks import runs_pareto_blocks
from trainfast_tui.report.speed_blocks import speed_blocks
from trainfast_tui.text import oom_words
from trainfast_tui.text.comparison_words import interval_text
from trainfast_tui.text.diagnosis_words import no_bottleneck_in_result
from trainfast_tui.text.format import (
    ABSENT,
    celsius,
    duration,
    fraction,
    joules,
    milliseconds,
    number,
    signed_percent,
    size,
    with_sizes,
)
from trainfast_tui.text.overrides import typed_overrides
from trainfast_tui.text.result_figures import figure_rows, result_notes
from trainfast_tui.text.signs import doubt_words
from trainfast_tui.text.speed_words import SAMPLES_VARY, few_steps_note
from trainfast_tui.text.tables import figure_headings

ABSENT_NOTE = f"{ABSENT} stands for a figure that was not measured."


def runs_report(runs: Sequence[ReportedRun]) -> list[Block]:
    """Return the whole report of one run or more; the others are compared with the first."""
    sections = [*run_sections(runs), *runs_pareto_blocks(runs)]
    return [*_question(runs), *machine_blocks(runs), *sections, *export_blocks(runs)]


def run_sections(runs: Sequence[ReportedRun]) -> list[Block]:
    """Return the tables of all runs, their speed, phases and memory, then each run's diagnosis and charts."""
    blocks: list[Block] = [Heading("Runs" if len(runs) > 1 else "The run"), _runs_grid(runs), Prose(ABSENT_NOTE)]
    blocks += _throughput_picture(runs)
    blocks += _asked_and_ran(runs)
    blocks += speed_blocks(runs)
    blocks += phase_blocks(runs)
    blocks += memory_blocks(runs)
    blocks += [Heading("Energy, heat and throttling"), _energy_grid(runs)]
    for run in runs:
        blocks += _one_run(run)
    return blocks


def _question(runs: Sequence[ReportedRun]) -> Iterator[Block]:
    names = list(dict.fromkeys(run.result.name for run in runs))
    if len(runs) == 1:
        yield Prose(f"How fast does {names[0]} train with these settings, with how much memory, and what slows it?")
    else:
        yield Prose(f"How do {len(runs)} runs of {' and '.join(names)} differ? Each is compared with run A, the first.")
    titles = dict.fromkeys(
        (run.result.name, run.run_file.title) for run in runs if run.run_file is not None and run.run_file.title
    )
    yield from (Prose(f"{name}: {title}.") for name, title in titles)


def _runs_grid(runs: Sequence[ReportedRun]) -> Grid:
    """Return a row for each run: settings, throughput with its spread, step, memory, energy, throttling and end."""
    header = ["", "run", "settings", *figure_headings("samples/s", "MAD"), f"against {runs[0].label}"]
    header += [*figure_headings("tokens/s", "step", "peak memory", "predicted", "J/sample"), "throttled", "end"]
    return filled_grid(header, (_row(run, runs[0]) for run in runs))


def _row(run: ReportedRun, first: ReportedRun) -> list[str]:
    result = run.result
    rate, few_note = result.throughput.samples_per_s, few_steps_note(result.steps.measured)
    return [
        run.label,
        result.run_id,
        " ".join(typed_overrides(without_search_settings(result.overrides, result.role))) or "as the preset sets them",
        number(rate.typical),
        few_note if few_note and rate.typical is not None else number(rate.mad),
        "" if run is first else _against(first.result, result),
        number(result.throughput.tokens_per_s.typical),
        milliseconds(result.step_ms.p50),
        size(result.memory.peak_allocated_bytes),
        size(result.memory.predicted_bytes),
        joules(result.energy.joules_per_sample),
        _throttled_words(result),
        _end_words(result),
    ]


def _throttled_words(result: Result) -> str:
    """Return the throttled share of the measured time by cause, of the worst device; ABSENT if no cause was read."""
    shares = [(cause.text, getattr(result.throttle, f"{cause.name}_fraction")) for cause in CAUSES]
    read_shares = [(words, share) for words, share in shares if share is not None]
    throttled = [f"{fraction(share, 1)} by {words}" for words, share in read_shares if share]
    return ", ".join(throttled) or ("not throttled" if read_shares else ABSENT)


def _end_words(result: Result) -> str:
    """Return the end state, its reason, and the doubts about the figures."""
    reason = with_sizes(notable_reason(result.state, result.reason))
    words = f"{state_text(result.state)}: {reason}" if reason else state_text(result.state)
    return "; ".join(filter(None, (words, doubt_words(doubts(result)))))


def _against(first: Result, result: Result) -> str:
    """Return the difference in throughput, its 95 % interval, and the verdict."""
    row = compare(first, result).rows[0]
    if row.percent is None or row.verdict in DIFFERENT_SAMPLE_VERDICTS:
        return row.verdict
    ci_words = f" (95 % CI: {interval_text(row)})" if row.interval_percent else ""
    return f"{signed_percent(row.percent)}{ci_words}: {row.verdict}"


def _throughput_picture(runs: Sequence[ReportedRun]) -> Iterator[Block]:
    if len(runs) < 2:
        return
    whiskers = []
    for run in runs:
        rate = run.result.throughput.samples_per_s
        if rate.typical is not None:
            few_note = few_steps_note(run.result.steps.measured)
            mad = None if few_note else rate.mad
            note = f" ({few_note})" if few_note else f" ± {number(mad)}" if mad is not None else f" ({SAMPLES_VARY})"
            low, high = rate.typical - (mad or 0.0), rate.typical + (mad or 0.0)
            words = number(rate.typical) + note
            whiskers.append(Whisker(f"run {run.label}", low, rate.typical, high, words, "success"))
    title, axis = "throughput of each run, with its MAD", "samples/s, median of the measured steps"
    yield from as_blocks(whisker_picture(title, axis, whiskers, number))


def _asked_and_ran(runs: Sequence[ReportedRun]) -> Iterator[Block]:
    rows = [
        (run.label, mismatch.field, str(mismatch.asked), f"{mismatch.ran} (rank {mismatch.rank})")
        for run in runs
        for mismatch in mismatches(run.records.run, run.records.worker_lines)
    ]
    rows += [
        (
            run.label,
            override.knob,
            str(override.asked),
            "unknown" if override.ran is None else f"{override.ran} (by {override.by})",
        )
        for run in runs
        for override in (run.result.script.overridden if run.result.script is not None else ())
    ]
    yield Heading("Asked and ran", 3)
    if rows:
        yield Grid(("", "setting", "asked", "ran"), tuple(rows))
        return
    if any(lines for run in runs for lines in run.records.worker_lines.values()):
        yield Prose("Every setting that a rank read from its live objects is the one that was asked for.")
    else:
        yield Prose("No rank recorded the settings that it ran.")


def _energy_grid(runs: Sequence[ReportedRun]) -> Grid:
    throttled_headings = figure_headings(*(f"throttled by {cause.text}" for cause in CAUSES))
    header = ["", *figure_headings("energy", "a sample", "a step"), "from", *throttled_headings]
    header += figure_headings("clock loss", "at the start", "as measuring began")
    rows = []
    for run in runs:
        energy, throttle, conditions = run.result.energy, run.result.throttle, run.result.conditions
        source = energy.source or (f"unavailable: {energy.reason}" if energy.reason else "no counter was read")
        figures = [joules(energy.joules), joules(energy.joules_per_sample), joules(energy.joules_per_step)]
        shares = [fraction(getattr(throttle, f"{cause.name}_fraction"), 1) for cause in CAUSES]
        heat = [celsius(conditions.start_temperature_c), celsius(conditions.measured_from_temperature_c)]
        rows.append([run.label, *figures, source, *shares, fraction(throttle.clock_loss_fraction, 1), *heat])
    return filled_grid(header, rows)


def _one_run(run: ReportedRun) -> Iterator[Block]:
    result = run.result
    yield Heading(f"Run {run.label}: {result.run_id}")
    yield Prose(f"{result.name}, {_end_words(result)}, after {duration(result.seconds)}.")
    yield pairs_grid("figure", figure_rows(result))
    if remarks := tuple(result_notes(result)):
        yield Listing(remarks)
    yield from _out_of_memory(result)
    yield Heading("Diagnosis", 3)
    yield from _diagnosis(result)
    yield Heading("Over time", 3)
    for chart in charts_of(run):
        yield strip_picture(chart, run.origin_ns)


def _out_of_memory(result: Result) -> Iterator[Block]:
    explanation = result.oom
    if explanation is None:
        return
    yield Heading("Out of memory", 3)
    yield Listing(tuple(oom_words.oom_sentences(explanation)) or ("Nothing more is known about it.",))
    if explanation.changes:
        yield Prose(f"To make it fit, {oom_words.changes_title(explanation.changes)}")
        yield changes_grid(explanation.changes)


def changes_grid(changes: Sequence[OomChange]) -> Grid:
    """Return the changes of knobs that would make a run fit, with their costs."""
    rows = [(oom_words.change_options(change), change.saves, change.costs) for change in changes]
    return filled_grid(("change", "saves", "costs in speed"), rows)


def _diagnosis(result: Result) -> Iterator[Block]:
    if result.diagnosis:
        yield Listing(tuple(f"{bottleneck.line}. Try: {bottleneck.advice}" for bottleneck in result.diagnosis))
    else:
        yield Prose(no_bottleneck_in_result(result))

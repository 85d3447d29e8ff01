"""Runs as blocks of a report: a table of settings and figures, the machine, each verdict, pictures and exports."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from dataclasses import replace as replaced_struct
from pathlib import Path

from msgspec.structs import replace

from trainfast_runner.errors import UserError
from trainfast_runner.export.formats import FORMS, export_run
from trainfast_runner.machine.telemetry.throttle import CAUSES
from trainfast_runner.memory.timeline import CATEGORIES
from trainfast_runner.records.json_lines import Thinned, remaining_records
from trainfast_runner.records.result import OomChange, Result
from trainfast_runner.records.run_directory import TELEMETRY_FILE, RunRecords, notable_reason, read_records, state_text
from trainfast_runner.records.run_file import RunFile
from trainfast_runner.records.tick import TelemetryTail, Tick
from trainfast_runner.results.comparison import DIFFERENT_SAMPLE_VERDICTS, compare, compared_conditions
from trainfast_runner.results.doubts import doubts
from trainfast_runner.results.verdict import mismatches
from trainfast_runner.running.follower import Follower, Rates, RunSnapshot, SummedRates
from trainfast_runner.settings.device_counts import ranks_with_samples
from trainfast_runner.settings.spec import without_search_settings
from trainfast_runner.units import counted
from trainfast_tui.charts.chart_data import ChartData, TimeAxis, gap_ns_of
from trainfast_tui.charts.charted import cpu_charts, device_charts, has_gpu_samples, reading_names, throughput_chart
from trainfast_tui.live.snapshot import Snapshot, used_uuids
from trainfast_tui.report.blocks import Block, Code, Grid, Heading, Listing, Prose, filled_grid, pairs_grid
from trainfast_tui.report.pictures import strip_picture, throttled_sentences
from trainfast_tui.text import format as fmt
from trainfast_tui.text import memory_words
from trainfast_tui.text.diagnosis_words import no_bottleneck_in_result
from trainfast_tui.text.format import ABSENT
from trainfast_tui.text.next_run_words import few_steps_note, typed_overrides
from trainfast_tui.text.result_words import figure_rows, interval_text, result_notes

ABSENT_NOTE = f"{ABSENT} stands for a figure that was not measured."
MAX_TICKS = 20_000
"""The most samples in a chart, five hours of one a second: a picture is 300 columns wide."""


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
    thinned = Thinned[Tick](MAX_TICKS)
    try:
        for tick in remaining_records(TelemetryTail(directory / TELEMETRY_FILE, Tick)):
            thinned.add(thinned.total, tick)
    except OSError:
        return ()
    return tuple(thinned.records())


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
    return [Prose(question), *map(Prose, titles), *run_sections(runs), *export_blocks(runs)]


def run_sections(runs: Sequence[ReportedRun]) -> list[Block]:
    """Return the tables of all runs and of the machine, then each run's verdict and charts."""
    blocks: list[Block] = [Heading("Runs" if len(runs) > 1 else "The run"), _runs_grid(runs), Prose(ABSENT_NOTE)]
    blocks += [*_asked_and_ran(runs), Heading("Machine"), _machine_grid(runs)]
    for run in runs:
        blocks += _one_run(run)
    return blocks


def _runs_grid(runs: Sequence[ReportedRun]) -> Grid:
    """Return a row for each run: settings, throughput with its spread, step, memory, energy, throttling and end."""
    header = ["", "run", "settings", *fmt.figure_headings("samples/s", "MAD"), f"against {runs[0].label}"]
    header += [*fmt.figure_headings("tokens/s", "step", "peak memory", "predicted", "J/sample"), "throttled", "end"]
    return filled_grid(header, (_run_row(run, runs[0]) for run in runs))


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
        yield Heading("Asked and ran", 3)
        yield Grid(("", "setting", "asked", "ran"), tuple(rows))
    elif any(lines for run in runs for lines in run.records.worker_lines.values()):
        yield Prose("Every setting that a rank read from its live objects is the one that was asked for.")


def _machine_grid(runs: Sequence[ReportedRun]) -> Block:
    """Return the facts about the machine, a column for each run."""
    facts = [dict(_facts(run)) for run in runs]
    names = dict.fromkeys(name for of_run in facts for name in of_run)
    if not names:
        return Prose("Nothing about the machine is on record.")
    labels = [run.label for run in runs] if len(runs) > 1 else [""]
    return Grid(("", *labels), tuple((name, *(of_run.get(name, ABSENT) for of_run in facts)) for name in names))


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
    yield Heading(f"Run {run.label}: {result.run_id}")
    yield Prose(f"{result.name}, {_end_words(result)}, after {fmt.duration(result.seconds)}.")
    yield pairs_grid([*figure_rows(result), *_predicted_parts(run)])
    if remarks := tuple(result_notes(result)):
        yield Listing(remarks)
    if (explanation := result.oom) is not None:
        yield Listing(tuple(memory_words.oom_sentences(explanation)))
        if explanation.changes:
            yield Prose(f"To make it fit, {memory_words.changes_title(explanation.changes)}")
            yield changes_grid(explanation.changes)
    if result.diagnosis:
        yield Listing(tuple(f"{bottleneck.line}. Try: {bottleneck.advice}" for bottleneck in result.diagnosis))
    else:
        yield Prose(f"{no_bottleneck_in_result(result)}.".capitalize())
    charts = charts_of(run)
    if throttled := " ".join(throttled_sentences(charts[0], run.origin_ns)):
        yield Prose(throttled)
    for chart in charts:
        yield strip_picture(chart, run.origin_ns) or Prose(f"{chart.title}: {chart.empty}")


def _predicted_parts(run: ReportedRun) -> Iterator[tuple[str, str]]:
    """Yield the predicted memory by category; nothing without a prediction."""
    parts = run.run_file.predicted_parts if run.run_file is not None else {}
    sizes = {name: parts[f"{name}_bytes"] for name in CATEGORIES if parts.get(f"{name}_bytes")}
    if sizes:
        words = [f"{memory_words.category_words(name)} {fmt.size(value)}" for name, value in sizes.items()]
        yield "predicted parts", ", ".join(words)


def changes_grid(changes: Sequence[OomChange]) -> Grid:
    """Return the changes of knobs that would make a run fit, with their costs."""
    rows = [(memory_words.change_options(change), change.saves, change.costs) for change in changes]
    return filled_grid(("change", "saves", "costs in speed"), rows)


def charts_of(run: ReportedRun) -> list[ChartData]:
    """Return throughput and every device reading over the whole run, with the first measured step marked."""
    rates, ticks, steps = run.snapshot.rates, run.snapshot.ticks, run.snapshot.steps
    ends_ns = [*rates.times_ns[-1:], *(tick.t_ns for tick in ticks[-1:])]
    axis = TimeAxis(run.origin_ns, max(ends_ns, default=run.origin_ns + 1), is_live=False)
    snapshot = Snapshot(taken_ns=axis.end_ns, run=run.snapshot, ticks=(), has_read_home=True)
    throughput = throughput_chart(snapshot, axis, "samples", sorted(used_uuids(run.snapshot)))
    # The steps of a long run are thinned: they lie further apart than the screen's.
    throughput = replace(throughput, gap_ns=gap_ns_of(rates.times_ns, throughput.gap_ns))
    charts = [throughput, *device_charts(snapshot, axis, 0, len(reading_names(snapshot)))]
    if has_gpu_samples(snapshot) and run.run_file is not None and run.run_file.device == "cpu":
        # On the screen the charts of watched GPUs replace those of the CPU; a report has both.
        charts += cpu_charts(ticks, axis, has_run=True)
    # A long run's snapshot has only its newest steps, none of them warm-up.
    has_warmup = any(step.warmup for step in steps)
    measured_ns = next((step.begin_ns for step in steps if has_warmup and not step.warmup), None)
    return [replace(chart, cursor_ns=measured_ns) for chart in charts]


def export_blocks(runs: Sequence[ReportedRun]) -> Iterator[Block]:
    """Yield each run's settings in every form, and for a form that refuses the run its reason."""
    yield Heading("Settings to use elsewhere")
    for run in runs:
        if run.run_file is None:
            yield Prose(f"{run.result.run_id} has no readable run.json, so there are no settings to export.")
            continue
        yield Heading(f"Run {run.label}: {run.result.run_id}", 3)
        for form in FORMS:
            try:
                exported = export_run(run.run_file, run.directory, form)
            except UserError as error:
                yield Prose(f"Not as {form}: {error.message}.")
                continue
            left_out = f" (cannot be expressed: {', '.join(exported.left_out)})" if exported.left_out else ""
            yield Code(f"{form}{left_out}", exported.text)

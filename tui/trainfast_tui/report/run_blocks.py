"""Runs as blocks of a report: settings, speed, phases, memory, energy, machine, charts and exports of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from dataclasses import replace as replaced_struct
from pathlib import Path

from msgspec.structs import replace

from trainfast_runner.errors import UserError, mean_of_known
from trainfast_runner.export.formats import FORMS, export_run
from trainfast_runner.machine.telemetry.throttle import CAUSES
from trainfast_runner.memory.prediction import CATEGORIES
from trainfast_runner.records.json_lines import Thinned, remaining_records
from trainfast_runner.records.result import OomChange, Result
from trainfast_runner.records.run_directory import TELEMETRY_FILE, notable_reason, state_text
from trainfast_runner.records.run_file import PredictedSpeed, RunFile
from trainfast_runner.records.run_records import RunRecords, read_records
from trainfast_runner.records.tick import TelemetryTail, Tick
from trainfast_runner.results.comparison import DIFFERENT_SAMPLE_VERDICTS, compare, compared_conditions, speeds_rank
from trainfast_runner.results.distributions import pareto_front
from trainfast_runner.results.doubts import doubts
from trainfast_runner.results.verdict import mismatches
from trainfast_runner.running.follower import Follower, Rates, RunSnapshot, SummedRates
from trainfast_runner.settings.device_counts import ranks_with_samples
from trainfast_runner.settings.spec import without_search_settings
from trainfast_runner.units import counted
from trainfast_runner.worker.shared.words import MEMORY_PHASES, STEP_PHASES
from trainfast_tui.charts.chart_data import ChartData, TimeAxis, gap_ns_of
from trainfast_tui.charts.charted import cpu_charts, device_charts, has_gpu_samples, reading_names, throughput_chart
from trainfast_tui.live.snapshot import Snapshot, used_uuids
from trainfast_tui.report.blocks import Block, Code, Grid, Heading, Listing, Prose, as_blocks, filled_grid, pairs_grid
from trainfast_tui.report.pictures import (
    BEHIND_FRONT,
    ON_FRONT,
    Axis,
    PicturePoint,
    StackedBar,
    StackedPart,
    Whisker,
    scatter_picture,
    stacked_picture,
    strip_picture,
    whisker_picture,
)
from trainfast_tui.text import format as fmt
from trainfast_tui.text import memory_words
from trainfast_tui.text.diagnosis_words import no_bottleneck_in_result
from trainfast_tui.text.format import ABSENT, PHASE_TONES
from trainfast_tui.text.memory_words import category_words, phase_words, short_category
from trainfast_tui.text.next_run_words import SAMPLES_VARY, few_steps_note, typed_overrides
from trainfast_tui.text.result_words import figure_rows, interval_text, result_notes

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
            rows.append(_memory_row(run, phase, predicted, measured))
            bars += _memory_bars(run, phase, predicted, measured)
    if not rows:
        return [Heading("Memory"), Prose("No peak was predicted, and none was measured.")]
    figures = fmt.figure_headings(*map(short_category, CATEGORIES), "predicted", "measured", "difference")
    picture = stacked_picture(
        "memory at its peak, a rank", "bytes at the peak of the phase", bars, fmt.size, binary=True
    )
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


def _memory_row(run: ReportedRun, phase: str, predicted: dict[str, int], measured: int | None) -> list[str]:
    total = sum(predicted.values())
    parts = [fmt.size(predicted[name]) if name in predicted else ABSENT for name in CATEGORIES]
    return [
        run.label,
        phase_words(phase),
        *parts,
        fmt.size(total) if predicted else ABSENT,
        fmt.size(measured),
        fmt.signed_percent(fmt.percent_change(measured, total)),
    ]


def _memory_bars(run: ReportedRun, phase: str, predicted: dict[str, int], measured: int | None) -> Iterator[StackedBar]:
    phase_title = phase_words(phase).removeprefix("the ")
    if any(predicted.values()):
        parts = [StackedPart(category_words(name), value, TONE_OF_CATEGORY[name]) for name, value in predicted.items()]
        yield StackedBar(f"{run.label}: {phase_title}", tuple(parts), f"{fmt.size(sum(predicted.values()))} predicted")
    if measured is not None:
        part = StackedPart("measured", measured, "muted")
        yield StackedBar(f"{run.label}: {phase_title}", (part,), f"{fmt.size(measured)} measured")


def phase_blocks(runs: Sequence[ReportedRun]) -> list[Block]:
    """Return the median phases of a step, and percentiles of the whole."""
    if not any(run.result.steps.measured for run in runs):
        return [Heading("Phases of a step"), Prose("No step was measured.")]
    header = ("", *fmt.figure_headings("steps", "step p50", "p90", "p99", *STEP_PHASES))
    table = filled_grid(header, map(_phase_row, runs))
    bars = [
        _phase_bar(run) for run in runs if any(getattr(run.result.step_ms, name) is not None for name in STEP_PHASES)
    ]
    picture = stacked_picture("phases of a step", "milliseconds, medians of the measured steps", bars, fmt.milliseconds)
    notes = [] if bars else [Prose("No phase of a step was measured.")]
    return [Heading("Phases of a step"), table, *notes, *as_blocks(picture)]


def _phase_row(run: ReportedRun) -> list[str]:
    times, measured = run.result.step_ms, run.result.steps.measured
    tail = [fmt.milliseconds(times.p90), fmt.milliseconds(times.p99)]
    if few := few_steps_note(measured):
        tail = [few, few]
    return [
        run.label,
        fmt.count(measured),
        fmt.milliseconds(times.p50),
        *tail,
        *(_phase(run, name) for name in STEP_PHASES),
    ]


def _phase(run: ReportedRun, name: str) -> str:
    """Return the median of a phase with its deviation, if there is one."""
    value, mad = getattr(run.result.step_ms, name), run.result.step_ms.mad.get(name)
    if value is None:
        return ABSENT
    return fmt.milliseconds(value) + (f" (MAD {fmt.milliseconds(mad)})" if mad is not None else "")


def _phase_bar(run: ReportedRun) -> StackedBar:
    times = run.result.step_ms
    parts = [
        StackedPart(name, value, PHASE_TONES[name])
        for name in STEP_PHASES
        if (value := getattr(times, name)) is not None
    ]
    return StackedBar(f"run {run.label}", tuple(parts), f"{fmt.milliseconds(times.p50)} in all")


FIGURES = fmt.figure_headings("predicted samples/s", "90 % interval", "measured", "difference")
HEADER = ("", *FIGURES, "in the interval", "predicted from")


def speed_blocks(runs: Sequence[ReportedRun]) -> list[Block]:
    """Return the table and the intervals of the runs whose speed was predicted; empty if none was."""
    speeds = [(run, run.result.throughput.predicted) for run in runs]
    predicted = [(run, speed) for run, speed in speeds if speed is not None]
    if not predicted:
        return []
    whiskers = [whisker for run, speed in predicted for whisker in _whiskers(run, speed)]
    picture = whisker_picture("speed predicted and measured", "samples/s, the 90 % interval", whiskers, fmt.number)
    table = filled_grid(HEADER, [_speed_row(run, speed) for run, speed in predicted])
    return [Heading("Speed predicted and measured"), table, *as_blocks(picture)]


def _speed_row(run: ReportedRun, speed: PredictedSpeed) -> list[str]:
    measured = run.result.throughput.samples_per_s.typical
    difference = fmt.signed_percent(fmt.percent_change(measured, speed.median))
    inside_word = ABSENT if measured is None else "yes" if speed.low <= measured <= speed.high else "no"
    ends = fmt.interval(speed.low, speed.high)
    return [run.label, fmt.number(speed.median), ends, fmt.number(measured), difference, inside_word, speed.basis]


def _whiskers(run: ReportedRun, speed: PredictedSpeed) -> list[Whisker]:
    words = f"{fmt.number(speed.median)} predicted"
    whiskers = [Whisker(f"run {run.label}: predicted", speed.low, speed.median, speed.high, words, "muted")]
    measured = run.result.throughput.samples_per_s.typical
    if measured is not None:
        words = f"{fmt.number(measured)} measured"
        whiskers.append(Whisker(f"run {run.label}: measured", measured, measured, measured, words, "success"))
    return whiskers


def machine_blocks(runs: Sequence[ReportedRun]) -> list[Block]:
    """Return the table; a value that every run shares stands alone."""
    labels_by_fact: dict[str, dict[str, list[str]]] = {}
    for run in runs:
        for name, value in _facts(run):
            labels_by_fact.setdefault(name, {}).setdefault(value, []).append(run.label)
    rows = [(name, _value_with_runs(labels_by_value, len(runs))) for name, labels_by_value in labels_by_fact.items()]
    table: Block = pairs_grid("", rows) if rows else Prose("Nothing about the machine is on record.")
    return [Heading("Machine"), table]


def _value_with_runs(labels_by_value: dict[str, list[str]], run_count: int) -> str:
    """Return the value that all runs share, or each value with the labels of the runs that have it."""
    if len(labels_by_value) == 1 and sum(map(len, labels_by_value.values())) == run_count:
        return next(iter(labels_by_value))
    return "; ".join(f"{value} ({', '.join(labels)})" for value, labels in labels_by_value.items())


def _facts(run: ReportedRun) -> Iterator[tuple[str, str]]:
    """Yield each fact on record by name."""
    run_file, result = run.run_file, run.result
    if run_file is not None:
        names = f": {', '.join(run_file.device_names)}" if run_file.device_names else ""
        yield "device", f"{run_file.device}{names}, {counted(run_file.world_size, 'process', 'processes')}"
    yield from _host(run)
    gpus = dict.fromkeys(device.name for tick in run.snapshot.ticks[-1:] for device in tick.devices if device.name)
    if gpus:
        yield "GPUs of the machine", ", ".join(gpus)
    if run_file is not None:
        if run_file.link is not None:
            yield "slowest link", run_file.link
        yield from ((name, version) for name, version in run_file.versions.items() if version and name != "driver")
    for row in compared_conditions(result, result):
        if row.a is not None:
            yield row.label, row.a
    if result.cpu is not None and result.cpu.threads is not None:
        yield "threads of a rank", str(result.cpu.threads)


def _host(run: ReportedRun) -> Iterator[tuple[str, str]]:
    host = next((tick.host for tick in run.snapshot.ticks if tick.host.cpu_count), None)
    if host is None:
        return
    yield "CPU cores", str(host.cpu_count)
    if host.memory_total_bytes is not None:
        yield "host memory", fmt.size(host.memory_total_bytes)
    cpu_percent = mean_of_known(tick.host.cpu_percent for tick in run.snapshot.ticks)
    if cpu_percent is not None:
        yield "CPU in use, of all cores", f"{fmt.percent(cpu_percent)} on average"


def export_blocks(runs: Sequence[ReportedRun]) -> list[Block]:
    """Return each run's settings in every form, and for a form that refuses the run its reason."""
    return [Heading("Settings to use elsewhere"), *(block for run in runs for block in _exports(run))]


def _exports(run: ReportedRun) -> Iterator[Block]:
    if run.run_file is None:
        yield Prose(f"{run.result.run_id} has no readable run.json, so there are no settings to export.")
        return
    yield Heading(f"Run {run.label}: {run.result.run_id}", 3)
    refusals = []
    for form in FORMS:
        try:
            exported = export_run(run.run_file, run.directory, form)
        except UserError as error:
            refusals.append(f"Not as {form}: {error.message}.")
            continue
        left_out = f" (cannot be expressed: {', '.join(exported.left_out)})" if exported.left_out else ""
        yield Code(f"{form}{left_out}", exported.text)
    yield from map(Prose, refusals)


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


def _throughput_picture(runs: Sequence[ReportedRun]) -> Iterator[Block]:
    if len(runs) < 2:
        return
    whiskers = []
    for run in runs:
        rate = run.result.throughput.samples_per_s
        if rate.typical is not None:
            few_note = few_steps_note(run.result.steps.measured)
            mad = None if few_note else rate.mad
            note = (
                f" ({few_note})" if few_note else f" ± {fmt.number(mad)}" if mad is not None else f" ({SAMPLES_VARY})"
            )
            low, high = rate.typical - (mad or 0.0), rate.typical + (mad or 0.0)
            words = fmt.number(rate.typical) + note
            whiskers.append(Whisker(f"run {run.label}", low, rate.typical, high, words, "success"))
    title, axis = "throughput of each run, with its MAD", "samples/s, median of the measured steps"
    yield from as_blocks(whisker_picture(title, axis, whiskers, fmt.number))


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
    throttled_headings = fmt.figure_headings(*(f"throttled by {cause.text}" for cause in CAUSES))
    header = ["", *fmt.figure_headings("energy", "a sample", "a step"), "from", *throttled_headings]
    header += fmt.figure_headings("clock loss", "at the start", "as measuring began")
    rows = []
    for run in runs:
        energy, throttle, conditions = run.result.energy, run.result.throttle, run.result.conditions
        source = energy.source or (f"unavailable: {energy.reason}" if energy.reason else "no counter was read")
        figures = [fmt.joules(energy.joules), fmt.joules(energy.joules_per_sample), fmt.joules(energy.joules_per_step)]
        shares = [fmt.fraction(getattr(throttle, f"{cause.name}_fraction"), 1) for cause in CAUSES]
        heat = [fmt.celsius(conditions.start_temperature_c), fmt.celsius(conditions.measured_from_temperature_c)]
        rows.append([run.label, *figures, source, *shares, fmt.fraction(throttle.clock_loss_fraction, 1), *heat])
    return filled_grid(header, rows)


def _one_run(run: ReportedRun) -> Iterator[Block]:
    result = run.result
    yield Heading(f"Run {run.label}: {result.run_id}")
    yield Prose(f"{result.name}, {_end_words(result)}, after {fmt.duration(result.seconds)}.")
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
    yield Listing(tuple(memory_words.oom_sentences(explanation)) or ("Nothing more is known about it.",))
    if explanation.changes:
        yield Prose(f"To make it fit, {memory_words.changes_title(explanation.changes)}")
        yield changes_grid(explanation.changes)


def changes_grid(changes: Sequence[OomChange]) -> Grid:
    """Return the changes of knobs that would make a run fit, with their costs."""
    rows = [(memory_words.change_options(change), change.saves, change.costs) for change in changes]
    return filled_grid(("change", "saves", "costs in speed"), rows)


def _diagnosis(result: Result) -> Iterator[Block]:
    if result.diagnosis:
        yield Listing(tuple(f"{bottleneck.line}. Try: {bottleneck.advice}" for bottleneck in result.diagnosis))
    else:
        yield Prose(no_bottleneck_in_result(result))


def charts_of(run: ReportedRun) -> list[ChartData]:
    """Return throughput and every device reading over the whole run, with the first measured step marked."""
    axis = _axis(run)
    snapshot = Snapshot(taken_ns=axis.end_ns, run=run.snapshot, ticks=(), has_read_home=True)
    names = reading_names(snapshot)
    throughput = throughput_chart(snapshot, axis, "samples", sorted(used_uuids(run.snapshot)))
    # The steps of a long run are thinned: they lie further apart than the screen's.
    step_gap_ns = gap_ns_of(run.snapshot.rates.times_ns, throughput.gap_ns)
    charts = [replace(throughput, gap_ns=step_gap_ns), *device_charts(snapshot, axis, 0, len(names))]
    if has_gpu_samples(snapshot) and run.run_file is not None and run.run_file.device == "cpu":
        # On the screen the charts of watched GPUs replace those of the CPU; a report has both.
        charts += cpu_charts(run.snapshot.ticks, axis, has_run=True)
    measured_from_ns = _measured_from_ns(run)
    return [replace(chart, cursor_ns=measured_from_ns) for chart in charts]


def _measured_from_ns(run: ReportedRun) -> int | None:
    """Return the begin of the first measured step; None without one, or if the snapshot has only later steps."""
    steps = run.snapshot.steps
    first = next((step for step in steps if not step.warmup), None)
    # A long run's snapshot has only its newest steps, none of them warm-up.
    if first is None or not any(step.warmup for step in steps):
        return None
    return first.begin_ns


def _axis(run: ReportedRun) -> TimeAxis:
    """Return the axis from the launch to the last record."""
    rates, ticks = run.snapshot.rates, run.snapshot.ticks
    ends = [*rates.times_ns[-1:], *(tick.t_ns for tick in ticks[-1:])]
    return TimeAxis(run.origin_ns, max(ends, default=run.origin_ns + 1), is_live=False)


def runs_pareto_blocks(runs: Sequence[ReportedRun]) -> list[Block]:
    """Return the picture; empty below two runs that compare in throughput and have a measured peak."""
    comparable = list(_comparable(runs))
    if len(comparable) < 2:
        return []
    # Of equal runs `pareto_front` keeps one, and none is beaten.
    front = {comparable[index][1:] for index in pareto_front([(peak, rate) for _, peak, rate in comparable])}
    points = [
        PicturePoint(
            peak,
            rate,
            ON_FRONT if (peak, rate) in front else BEHIND_FRONT,
            f"run {label}: {fmt.number(rate)} samples/s with {fmt.size(peak)}",
        )
        for label, peak, rate in comparable
    ]
    title, x_axis = "throughput by peak memory of each run", Axis("peak memory, a rank", fmt.size, binary=True)
    picture = scatter_picture(title, points, [], x_axis, Axis("samples/s", fmt.number))
    return [Heading("Memory against throughput"), *as_blocks(picture)]


def _comparable(runs: Sequence[ReportedRun]) -> Iterator[tuple[str, int, float]]:
    """Yield label, peak bytes and samples/s of the runs whose samples are as much work as those of the first."""
    first = runs[0]
    for run in runs:
        peak, rate = run.result.memory.peak_allocated_bytes, run.result.throughput.samples_per_s.typical
        compares = _sample_work(run) == _sample_work(first) and speeds_rank(first.result, run.result)
        if peak is not None and rate is not None and compares:
            yield run.label, peak, rate


def _sample_work(run: ReportedRun) -> tuple[object, ...]:
    """Return the settings that decide a sample's work: model, data and length; for a script its name and folder."""
    run_file = run.run_file
    model: tuple[object, object] = (run.result.name, "")
    if run_file is not None:
        model = (run_file.name, run_file.cwd) if run_file.script is not None else (run_file.model, run_file.data)
    return *model, run.result.knobs.get("seq_len")


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

"""`bench`: run a preset's variants or a grid of settings, and print them as a table against the baseline."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import chain

import msgspec

from trainfast_runner.errors import UserError
from trainfast_runner.records.home import Home
from trainfast_runner.records.result import Result
from trainfast_runner.records.run_directory import exit_code_of, state_text
from trainfast_runner.results.comparison import DOUBTFUL, NOISE
from trainfast_runner.results.doubts import doubts
from trainfast_runner.running import planning
from trainfast_runner.running.planning import DevicesBusy
from trainfast_runner.search import bench as bench_rows
from trainfast_runner.search.conductor import Cancelled
from trainfast_runner.search.searches import incompatible_reason
from trainfast_runner.settings import script_preset
from trainfast_runner.settings.knobs import KNOBS_BY_NAME, read_vary
from trainfast_runner.settings.spec import RunSpec
from trainfast_runner.units import escaped
from trainfast_tui.cli import printing
from trainfast_tui.cli.arguments import add_python, add_repeated, add_settings, add_wait, finite, positive
from trainfast_tui.cli.exit_codes import EXIT_HUNG_UP, EXIT_INTERRUPTED
from trainfast_tui.cli.launching import follow, start_when_free
from trainfast_tui.cli.signals import Signals, caught_signals
from trainfast_tui.report.blocks import Document, as_html, as_markdown, code, grid, prose
from trainfast_tui.text import format as fmt
from trainfast_tui.text.format import DOUBT_SIGN, FigureHeading, doubt_words, with_sizes, without_empty_columns

MAX_BATCH_SCALE = 1_000_000


def bench_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "preset",
        metavar="PRESET",
        help="a preset with variants; NAME/VARIANT runs it and the baseline; with --vary any preset",
    )
    words = "a row for each value; may be given again: a row for each combination"
    add_repeated(parser, "--vary", "KNOB=A,B,C", words)
    add_settings(parser)
    parser.add_argument("--repeat", type=positive, default=1, metavar="N", help="run every row N times, A B A B")
    parser.add_argument(
        "--scale-batch",
        type=finite,
        default=1.0,
        metavar="F",
        help="multiply every variant's batch_size by F, such as 0.5; it stays at least 1",
    )
    parser.add_argument(
        "-o", dest="output", metavar="FILE", help="write the table there too, by the name as .md, .json or .html"
    )
    add_wait(parser)
    add_python(parser)
    parser.add_argument("--json", action="store_true", help="print {preset, baseline, rows[...]}")


def bench(arguments: argparse.Namespace) -> int:
    """Run the rows one after another; return the exit code of the baseline's end, 130 after Ctrl-C."""
    if not 0 < arguments.scale_batch <= MAX_BATCH_SCALE:
        raise UserError(f"--scale-batch must be above 0 and at most {MAX_BATCH_SCALE}", key="--scale-batch")
    bench = _prepared(arguments)
    output = printing.output_path(arguments.output, tuple(WRITERS)) if arguments.output else None
    results_by_row: dict[str, list[bench_rows.RowResult]] = {planned.id: [] for planned in bench.rows}
    with caught_signals() as signals:
        is_complete = _run_rows(bench, results_by_row, Home().create(), signals, arguments)
    if signals.must_leave:
        return EXIT_HUNG_UP
    table = bench_rows.tabulate(bench, results_by_row)
    if arguments.json:
        printing.print_json(table.fields())
    else:
        _print_table(table)
    if output is not None:
        text = WRITERS[output.suffix.lower()](table, shlex.join(["trainfast-tui", *sys.argv[1:]]))
        printing.write_output(output, text)
    baseline_state = next(row.state for row in table.rows if row.id == bench.baseline_id)
    return exit_code_of(baseline_state) if is_complete else EXIT_INTERRUPTED


def _prepared(arguments: argparse.Namespace) -> bench_rows.Bench:
    """Return the bench to run, of a preset or of a script. Raises UserError."""
    vary = read_vary(arguments.vary)
    if (script := script_preset.path_of(arguments.preset)) is None:
        return bench_rows.prepare(arguments.preset, arguments.settings, arguments.scale_batch, vary)
    if arguments.scale_batch != 1:
        raise UserError("--scale-batch is for a preset's variants", key="--scale-batch")
    return bench_rows.prepare_script(script_preset.load(script), vary, arguments.settings, arguments.python)


DROPPED = ("settings", "notebook's TFLOP/s", "TFLOP/s", "step ms", "published vs baseline", "peak MiB")
"""The columns that a narrow terminal leaves out, the first ones first."""


def _print_table(table: bench_rows.Table) -> None:
    """Print the table, on a narrow terminal without settings, then why rows did not finish, then notes."""
    columns = bench_columns(table)
    # Why a row did not finish stands below the table.
    columns["state"] = [state_text(row.state) for row in table.rows]
    header, cells = without_empty_columns(list(columns), zip(*columns.values(), strict=True))
    printing.print_table(header, cells, drop=(*DROPPED, "state"))
    for row in table.rows:
        if row.state != "finished":
            printing.print_line(f"{row.id}: {state_text(row.state)}: {with_sizes(row.reason)}")
    printing.print_lines(table_notes(table))


def _run_rows(
    bench: bench_rows.Bench,
    results_by_row: Mapping[str, list[bench_rows.RowResult]],
    home: Home,
    signals: Signals,
    arguments: argparse.Namespace,
) -> bool:
    """Run all rows and append to their results; return False if a signal or a stopped row ended the bench early.

    A row whose device another run has taken is not run. Raises DevicesBusy if no row was measured before.
    """
    runs = bench_rows.run_order(bench, arguments.repeat)
    for number, planned in enumerate(runs, start=1):
        if bench_rows.needs_no_repeat(results_by_row[planned.id]):
            continue
        printing.print_notice(f"{bench.preset} {number}/{len(runs)}: {planned.id}")
        try:
            result = _run_row(planned, home, signals, arguments)
        except Cancelled:
            return False
        if isinstance(result, DevicesBusy) and not any(
            isinstance(ran, Result) for ran in chain.from_iterable(results_by_row.values())
        ):
            raise result
        why = incompatible_reason(result, bench.varied) if isinstance(result, Result) else None
        if planned.plan is not None and isinstance(result, Result) and why is not None:
            result = UserError(why, key=result.run_id)  # a value that the script overrode was not tried
        results_by_row[planned.id].append(result)
        _print_row_result(result)
        state = result.state if isinstance(result, Result) else bench_rows.REFUSED
        # A failure may come with Ctrl-C.
        if state == "stopped" or (signals.interrupts and state not in ("finished", bench_rows.REFUSED)):
            return False
    return True


def _run_row(
    planned: bench_rows.PlannedRow, home: Home, signals: Signals, arguments: argparse.Namespace
) -> bench_rows.RowResult:
    """Run one row to its end; return the UserError if it cannot run here, or if another run uses its device.

    Raises Cancelled after a signal. `--python` trains a preset's rows.
    """
    if signals.received.is_set():
        raise Cancelled
    try:
        plan = planning.plan_run(planned.spec, arguments.python) if planned.plan is None else planned.plan()
    except UserError as error:
        return error
    try:
        directory = start_when_free(plan, home, signals, wait=arguments.wait)
    except DevicesBusy as busy:
        return busy
    result = follow(directory, signals, interrupt_stops=True)
    if result is None:
        raise Cancelled  # the terminal has gone
    return result


def _print_row_result(result: bench_rows.RowResult) -> None:
    """Print why a row has no figure; nothing for one that finished."""
    if isinstance(result, UserError):
        state = "not run" if isinstance(result, DevicesBusy) else "refused"
        printing.print_notice(f"{state}: {result.line()}")
    elif result.state != "finished":
        printing.print_notice(f"{state_text(result.state)}: {with_sizes(result.reason)}")


def _document(table: bench_rows.Table, command_block: str) -> Document:
    columns = bench_columns(table)
    table_block = grid(list(columns), zip(*columns.values(), strict=True))
    return Document(table.bench.title, (command_block, table_block, *map(prose, table_notes(table))))


WRITERS: dict[str, Callable[[bench_rows.Table, str], str]] = {
    ".md": lambda table, command: as_markdown(_document(table, code("The command of this table:", command))),
    ".json": lambda table, command: escaped(msgspec.json.encode(table.fields()).decode()) + "\n",
    ".html": lambda table, command: as_html(_document(table, prose(command))),
}
"""The writer for each ending of a file name: of the table, the command that makes it again, and the notes."""


BASELINE_SETTINGS = ("batch_size", "seq_len", "precision", "strategy")
"""Settings shown for the baseline; other rows show the settings that differ."""


def bench_columns(table: bench_rows.Table) -> dict[str, list[str]]:
    """Return the columns as text by heading; the column of a figure that no row has is empty."""
    bench, rows = table.bench, table.rows
    specs = {planned.id: planned.spec for planned in bench.rows}
    columns = {
        "variant": [row.id + (" (baseline)" if row.id == bench.baseline_id else "") for row in rows],
        "settings": [" ".join(_settings(bench, specs[row.id], specs[bench.baseline_id])) for row in rows],
    }
    for heading, measured in MEASURED_CELLS.items():
        columns[FigureHeading(heading)] = [
            measured(row, row.result) if row.result is not None and row.samples_per_s else "" for row in rows
        ]
    for name in dict.fromkeys(name for row in rows for name in row.published):
        columns[FigureHeading(f"published {name}")] = [str(row.published.get(name, "")) for row in rows]
    # The published gain is comparable across machines, the figures are not.
    columns[FigureHeading("published vs baseline")] = [_percent(row.published_vs_baseline_percent) for row in rows]
    columns[FigureHeading("ours / published")] = [_number(row.ratio) for row in rows]
    columns["diagnosis"] = [row.diagnosis or "" for row in rows]
    columns["state"] = [_state(row) for row in rows]
    return columns


def _settings(bench: bench_rows.Bench, row_spec: RunSpec, baseline: RunSpec) -> Iterator[str]:
    """Yield the settings of a row that differ from the baseline's, as `name=value`, without those of its id."""
    yield from (f"model.{name}={value}" for name, value in row_spec.model.items() if baseline.model.get(name) != value)
    # A script's row has only the knobs that were asked for.
    set_knobs = [name for name in KNOBS_BY_NAME if name in row_spec.knobs]
    differing_knobs = [name for name in set_knobs if row_spec.knobs[name] != baseline.knobs.get(name)]
    names = BASELINE_SETTINGS if row_spec is baseline else differing_knobs
    yield from (
        f"{name}={KNOBS_BY_NAME[name].text_of(row_spec.knobs[name])}"
        for name in names
        if name in row_spec.knobs and name not in bench.varied
    )


def _measured_gain(row: bench_rows.Row) -> str:
    gain = _percent(row.vs_baseline_percent)
    remark = {NOISE: " (noise)", DOUBTFUL: f" {DOUBT_SIGN}"}.get(row.verdict or "", "")
    return f"{gain}{remark}" if gain else ""


def _number(value: float | None) -> str:
    return "" if value is None else fmt.number(value)


def _percent(value: float | None) -> str:
    return "" if value is None else fmt.signed_percent(value)


MEASURED_CELLS: dict[str, Callable[[bench_rows.Row, Result], str]] = {
    "samples/s": lambda row, result: _number(row.rate),
    "vs baseline": lambda row, result: _measured_gain(row),
    "95 % CI": lambda row, result: "" if row.interval_percent is None else fmt.signed_interval(*row.interval_percent),
    "step ms": lambda row, result: _number(result.step_ms.p50),
    "peak MiB": lambda row, result: "" if row.peak_bytes is None else f"{row.peak_bytes / 2**20:,.0f}",
    "TFLOP/s": lambda row, result: _number(result.flops.model_tflops_per_device),
    "notebook's TFLOP/s": lambda row, result: _number(result.flops.notebook_tflops_per_device),
}
"""The cell of each measured figure by its heading; empty for an absent reading."""


def _state(row: bench_rows.Row) -> str:
    if row.state == "finished":
        return " ".join(filter(None, ("finished", doubt_words(doubts(row.result) if row.result is not None else ()))))
    return f"{state_text(row.state)}: {row.reason}"


def table_notes(table: bench_rows.Table) -> Iterator[str]:
    """Yield the notes for the reader of the table, one sentence at a time."""
    results = [row.result for row in table.rows if row.result is not None]
    if any(row.published for row in table.rows):
        yield "Published figures were measured on other hardware and software; they are facts to compare with."
    if table.bench.unpublished:
        yield table.bench.unpublished
    if any(result.memory.device_peak_used_bytes is None for result in results):
        yield "Peak MiB is the worst rank's allocations; no device memory could be read."
    if any(result.synthetic_data for result in results):
        yield "Some rows trained on synthetic data: their losses say nothing."

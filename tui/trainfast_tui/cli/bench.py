"""`bench`: run a preset's variants or a grid of settings, and print them as a table against the baseline."""

from __future__ import annotations

import argparse
import shlex
import sys

from trainfast_runner.errors import UserError
from trainfast_runner.records.home import Home
from trainfast_runner.records.run_states import exit_code_of, state_text
from trainfast_runner.search.bench.grid import prepare_grid
from trainfast_runner.search.bench.table import RowResult, Table, tabulate
from trainfast_runner.search.bench.variants import Bench, prepare_variants
from trainfast_runner.settings.scripts import script_preset
from trainfast_runner.settings.vary import read_vary
from trainfast_tui.cli.arguments import add_python, add_settings, add_wait, finite, positive
from trainfast_tui.cli.exit_codes import EXIT_HUNG_UP, EXIT_INTERRUPTED
from trainfast_tui.cli.launching.bench_rows import BenchOptions, BenchRows
from trainfast_tui.cli.printing.bench_file import WRITERS, bench_markdown
from trainfast_tui.cli.printing.bench_table import bench_columns, table_notes
from trainfast_tui.cli.printing.output import print_json, print_line, print_lines, print_table
from trainfast_tui.cli.printing.output_file import output_path, write_output
from trainfast_tui.cli.signals import caught_signals
from trainfast_tui.text.format import with_sizes
from trainfast_tui.text.tables import without_empty_columns

MAX_BATCH_SCALE = 1_000_000


def bench_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "preset",
        metavar="PRESET",
        help="a preset with variants; NAME/VARIANT runs it and the baseline; with --vary any preset",
    )
    parser.add_argument(
        "--vary",
        action="append",
        default=[],
        metavar="KNOB=A,B,C",
        help="a row for each value; may be given again: a row for each combination",
    )
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
        "-o", dest="output", metavar="FILE", help="write the table there too, by the name as .md, .csv, .json or .html"
    )
    parser.add_argument(
        "--cold", action="store_true", help="run every row in a process of its own, also where several can share one"
    )
    add_wait(parser)
    add_python(parser)
    parser.add_argument("--json", action="store_true", help="print {preset, baseline, rows[...]}")


def bench(arguments: argparse.Namespace) -> int:
    """Run the rows one after another; return the exit code of the baseline's end, 130 after Ctrl-C."""
    if not 0 < arguments.scale_batch <= MAX_BATCH_SCALE:
        raise UserError(f"--scale-batch must be above 0 and at most {MAX_BATCH_SCALE}", key="--scale-batch")
    bench = _prepared(arguments)
    output = output_path(arguments.output, tuple(WRITERS)) if arguments.output else None
    results_by_row: dict[str, list[RowResult]] = {planned.id: [] for planned in bench.rows}
    options = BenchOptions(
        repeat=arguments.repeat,
        cold=arguments.cold,
        wait=arguments.wait,
        python=arguments.python,
    )
    with caught_signals() as signals:
        is_complete = BenchRows(Home().create(), signals, options).run(bench, results_by_row)
    if signals.must_leave:
        return EXIT_HUNG_UP
    table = tabulate(bench, results_by_row)
    if arguments.json:
        print_json(table.fields())
    elif sys.stdout.isatty():
        _print_table(bench, table)
    else:
        print_lines(bench_markdown(bench, table, _command(arguments)).rstrip().split("\n"))
    if output is not None:
        write_output(output, WRITERS[output.suffix.lower()](bench, table, _command(arguments)))
    return exit_code_of(table.baseline_state) if is_complete else EXIT_INTERRUPTED


def _prepared(arguments: argparse.Namespace) -> Bench:
    """Return the bench to run, of a preset or of a script. Raises UserError."""
    vary = read_vary(arguments.vary)
    if (script := script_preset.path_of(arguments.preset)) is not None:
        if arguments.scale_batch != 1:
            raise UserError("--scale-batch is for a preset's variants", key="--scale-batch")
        from trainfast_runner.search.bench.script_grid import prepare_script_grid

        return prepare_script_grid(script_preset.load(script), vary, arguments.settings, arguments.python)
    if vary:
        return prepare_grid(arguments.preset, vary, arguments.settings, arguments.scale_batch)
    return prepare_variants(arguments.preset, arguments.settings, arguments.scale_batch)


def _print_table(bench: Bench, table: Table) -> None:
    """Print the table on a terminal without the settings, then why rows did not finish, then notes."""
    columns = bench_columns(bench, table)
    del columns["settings"]
    # Why a row did not finish stands below the table.
    columns["state"] = [state_text(row.state) for row in table.rows]
    rows = list(zip(*columns.values(), strict=True))
    header, cells = without_empty_columns(list(columns), rows)
    dropped = ("process", "notebook's TFLOP/s", "TFLOP/s", "step ms", "published vs baseline", "peak MiB", "state")
    print_table(header, cells, drop=dropped)
    for row in table.rows:
        if row.state != "finished":
            print_line(f"{row.id}: {state_text(row.state)}: {with_sizes(row.reason)}")
    print_lines(table_notes(table))


def _command(arguments: argparse.Namespace) -> str:
    """Return the command line that prints this table again."""
    words = ["trainfast-tui", "bench", arguments.preset]
    for varied in arguments.vary:
        words += ["--vary", varied]
    for setting in arguments.settings:
        words += ["--set", setting]
    if arguments.repeat != 1:
        words += ["--repeat", str(arguments.repeat)]
    if arguments.cold:
        words.append("--cold")
    if arguments.scale_batch != 1:
        words += ["--scale-batch", f"{arguments.scale_batch:g}"]
    if arguments.python is not None:
        words += ["--python", arguments.python]
    return shlex.join(words)

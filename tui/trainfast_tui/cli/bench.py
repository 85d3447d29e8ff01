"""`bench`: run a preset's variants or a grid of settings, and print them as a table against the baseline."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable
from itertools import chain
from typing import TypeVar

from trainfast_runner.errors import UserError
from trainfast_runner.records.home import Home
from trainfast_runner.records.result import Result
from trainfast_runner.records.run_file import EXIT_CODES
from trainfast_runner.running import launch, planning
from trainfast_runner.search.bench.grid import prepare_grid
from trainfast_runner.search.bench.report import MEASURED, markdown, measured, notes, process_word, published_gain
from trainfast_runner.search.bench.variants import (
    Bench,
    Entry,
    Outcome,
    Table,
    again_is_pointless,
    prepare,
    run_order,
    tabulate,
)
from trainfast_runner.search.bench.warm_rows import WarmRows, warm_groups, warm_rows
from trainfast_runner.search.processes import Interrupted
from trainfast_runner.settings import script_preset
from trainfast_runner.settings.vary import read_vary
from trainfast_tui.cli.bench_file import WRITERS
from trainfast_tui.cli.exit_codes import HUNG_UP, INTERRUPTED
from trainfast_tui.cli.follow_run import Signals, caught_signals, follow
from trainfast_tui.cli.number_types import finite, positive
from trainfast_tui.cli.output import print_json, print_line, print_lines, print_table
from trainfast_tui.cli.output_file import output_path, write_output
from trainfast_tui.cli.progress import Progress
from trainfast_tui.cli.start_run import predict_memory
from trainfast_tui.cli.training_arguments import add_python, add_settings, add_wait
from trainfast_tui.cli.waits import await_cooling, await_devices
from trainfast_tui.text.format import plain

MAX_BATCH_SCALE = 1_000_000
StartedT = TypeVar("StartedT")


def add(parser: argparse.ArgumentParser) -> None:
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
        "--scale-batch", type=finite, default=1.0, metavar="F", help="multiply every variant's batch by F, at least 1"
    )
    parser.add_argument(
        "-o", dest="output", metavar="FILE", help="write the table there too, by the name as .md, .csv, .json or .html"
    )
    parser.add_argument(
        "--cold", action="store_true", help="run every row in a process of its own, also where several can share one"
    )
    add_wait(parser)
    parser.add_argument("--cool-to", type=finite, metavar="C", help="wait until the GPUs are below C degrees Celsius")
    add_python(parser)
    parser.add_argument("--json", action="store_true", help="print {preset, baseline, rows[...]}")


def run(arguments: argparse.Namespace) -> int:
    """Run the rows one after another; return the exit code of the baseline's end, 130 after Ctrl-C."""
    if not 0 < arguments.scale_batch <= MAX_BATCH_SCALE:
        raise UserError(f"--scale-batch must be above 0 and at most {MAX_BATCH_SCALE}", key="--scale-batch")
    bench = _prepared(arguments)
    output = output_path(arguments.output, tuple(WRITERS)) if arguments.output else None
    outcomes: dict[str, list[Outcome]] = {entry.id: [] for entry in bench.entries}
    with caught_signals() as signals:
        is_complete = _run_all(bench, outcomes, Home().create(), signals, arguments)
    if signals.hung_up:
        return HUNG_UP
    table = tabulate(bench, outcomes)
    if arguments.json:
        print_json(table.fields())
    elif sys.stdout.isatty():
        _print_table(table)
    else:
        print_line(markdown(bench, table, _command(arguments)).rstrip())
    if output is not None:
        write_output(output, WRITERS[output.suffix.lower()](bench, table, _command(arguments)))
    return EXIT_CODES.get(table.baseline_state, 4) if is_complete else INTERRUPTED


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
    return prepare(arguments.preset, arguments.settings, arguments.scale_batch)


def _print_table(table: Table) -> None:
    """Print the table on a terminal, then why rows did not finish, then notes."""
    header = ["variant", *MEASURED, "published/s", "published vs baseline", "ratio", "process", "state"]
    rows = [
        [
            plain(row.id) + (" (baseline)" if row.id == table.baseline else ""),
            *measured(row),
            str(row.published.get("samples_per_s", "")),
            published_gain(row),
            "" if row.ratio is None else f"{row.ratio:.3g}",
            process_word(row),
            row.state.replace("_", " "),
        ]
        for row in table.rows
    ]
    filled = [column for column in range(len(header)) if any(row[column] for row in rows)]
    names = [header[column] for column in filled]
    dropped = ("process", "notebook's TFLOP/s", "TFLOP/s", "step ms", "published vs baseline", "peak MiB", "state")
    print_table(
        names,
        [[row[column] for column in filled] for row in rows],
        right=range(1, len(names) - (2 if "process" in names else 1)),
        drop=dropped,
    )
    for row in table.rows:
        if row.state != "finished":
            print_line(f"{plain(row.id)}: {row.state.replace('_', ' ')}: {plain(row.reason)}")
    print_lines(notes(table))
    if "published/s" in names:
        print_line("published/s is the published samples/s; ratio is the measured value over it.")


def _run_all(
    bench: Bench,
    outcomes: dict[str, list[Outcome]],
    home: Home,
    signals: Signals,
    arguments: argparse.Namespace,
) -> bool:
    """Run all rows and fill `outcomes`; return False if Ctrl-C or a closed terminal ended the bench early.

    A row whose device another run has taken is not run. Raises DevicesBusy if no row was measured before.
    """
    # Only presets can share a warm process: a script's rows are launched.
    is_cold = arguments.cold or any(entry.plan is not None for entry in bench.entries)
    groups = {} if is_cold else warm_groups(bench)

    def raise_if_stopped() -> None:
        if signals.interrupts or signals.hung_up:
            raise Interrupted

    with warm_rows(home, raise_if_stopped) as warm:
        total = len(bench.entries) * arguments.repeat
        for number, (_, entry) in enumerate(run_order(bench, arguments.repeat, groups), start=1):
            if again_is_pointless(outcomes[entry.id]):
                continue
            if signals.interrupts or signals.hung_up:
                return False
            group = groups.get(entry.id)
            Progress().print_line(plain(f"{bench.preset} {number}/{total}: {entry.id}{', warm' if group else ''}"))
            try:
                outcome = _run_one(entry, group, warm, home, signals, arguments)
            except launch.DevicesBusy as busy:
                if not any(isinstance(one, Result) for one in chain.from_iterable(outcomes.values())):
                    raise
                outcome = busy
            if entry.plan is not None and isinstance(outcome, Result):
                outcome = _refused_if_overridden(outcome, bench.varied)
            if outcome is None:
                return False
            outcomes[entry.id].append(outcome)
            if isinstance(outcome, UserError):
                what = "not run" if isinstance(outcome, launch.DevicesBusy) else "refused"
                Progress().print_line(plain(f"{what}: {outcome.line()}"))
            elif outcome.state != "finished":
                Progress().print_line(plain(f"{outcome.state.replace('_', ' ')}: {outcome.reason}"))
                if outcome.state == "stopped" or signals.interrupts:
                    return False
    return True


def _run_one(
    entry: Entry, group: str | None, warm: WarmRows, home: Home, signals: Signals, arguments: argparse.Namespace
) -> Outcome | None:
    """Run one entry to its end; return the UserError if it cannot run here, None if the terminal has gone.

    Raises DevicesBusy when another run uses its device, without --wait.
    """
    try:
        plan = planning.plan_run(entry.spec, arguments.python) if entry.plan is None else entry.plan()
    except UserError as error:
        return error

    def prepare() -> None:
        if arguments.cool_to is not None:
            await_cooling(plan, arguments.cool_to)
        if group is None:
            predict_memory(plan, home)

    def start_when_free(start: Callable[[], StartedT]) -> StartedT:
        """Start a process; with --wait retry if another run took the device during the preparation."""
        while True:
            if arguments.wait:
                await_devices(plan, home)
            prepare()
            try:
                return start()
            except launch.DevicesBusy:
                if not arguments.wait:
                    raise

    if group is not None and warm.has_process(group):
        prepare()
        return warm.train(plan)
    warm.end()
    if group is not None:
        start_when_free(lambda: warm.start(plan, group))
        return warm.train(plan)
    return follow(start_when_free(lambda: launch.start(plan, home)), signals, interrupt_stops=True)


def _refused_if_overridden(result: Result, varied: tuple[str, ...]) -> Outcome:
    """Return the result of a script's row, or the UserError for a value that the script overrode."""
    from trainfast_runner.search.script_runs import incompatible

    why = incompatible(result, varied)
    return result if why is None else UserError(why, key=result.run_id)


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
    return shlex.join(words)

"""`bench`: run a preset's variants or a grid of settings, and print them as a table against the baseline."""

from __future__ import annotations

import argparse
import csv
import io
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import msgspec

from trainfast_runner.errors import UserError
from trainfast_runner.records.home import Home
from trainfast_runner.records.result import Result
from trainfast_runner.records.run_directory import exit_code_of, state_text
from trainfast_runner.results.comparison import DOUBTFUL, NOISE
from trainfast_runner.results.doubts import doubts
from trainfast_runner.running import launch, planning
from trainfast_runner.running.planning import DevicesBusy, RunPlan
from trainfast_runner.search.bench import (
    Bench,
    PlannedRow,
    Row,
    RowResult,
    Table,
    WarmRows,
    needs_no_repeat,
    open_warm_rows,
    prepare_grid,
    prepare_script_grid,
    prepare_variants,
    run_order,
    tabulate,
    warm_groups,
)
from trainfast_runner.search.conductor import Cancelled
from trainfast_runner.settings import script_preset
from trainfast_runner.settings.knobs import KNOBS_BY_NAME, read_vary
from trainfast_runner.settings.spec import RunSpec
from trainfast_runner.units import escaped
from trainfast_runner.worker.shared.host import print_holder
from trainfast_tui.cli.arguments import add_python, add_settings, add_wait, finite, positive
from trainfast_tui.cli.exit_codes import EXIT_HUNG_UP, EXIT_INTERRUPTED
from trainfast_tui.cli.launching import StartedT, follow, predict_memory, start_when_free
from trainfast_tui.cli.printing import (
    output_path,
    print_json,
    print_line,
    print_lines,
    print_notice,
    print_table,
    write_output,
)
from trainfast_tui.cli.signals import Signals, caught_signals
from trainfast_tui.report.blocks import Block, Code, Document, Prose, as_html, as_markdown, filled_grid
from trainfast_tui.text import format as fmt
from trainfast_tui.text.format import DOUBT_SIGN, FigureHeading, doubt_words, plain, with_sizes, without_empty_columns

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
    options = BenchOptions(repeat=arguments.repeat, cold=arguments.cold, wait=arguments.wait, python=arguments.python)
    with caught_signals() as signals:
        is_complete = BenchRows(Home().create(), signals, options).run(bench, results_by_row)
    if signals.must_leave:
        return EXIT_HUNG_UP
    table = tabulate(bench, results_by_row)
    if arguments.json:
        print_json(table.fields())
    else:
        _print_table(bench, table)
    if output is not None:
        write_output(output, WRITERS[output.suffix.lower()](bench, table, _command(arguments)))
    return exit_code_of(table.baseline_state) if is_complete else EXIT_INTERRUPTED


def _prepared(arguments: argparse.Namespace) -> Bench:
    """Return the bench to run, of a preset or of a script. Raises UserError."""
    vary = read_vary(arguments.vary)
    if (script := script_preset.path_of(arguments.preset)) is not None:
        if arguments.scale_batch != 1:
            raise UserError("--scale-batch is for a preset's variants", key="--scale-batch")
        return prepare_script_grid(script_preset.load(script), vary, arguments.settings, arguments.python)
    if vary:
        return prepare_grid(arguments.preset, vary, arguments.settings, arguments.scale_batch)
    return prepare_variants(arguments.preset, arguments.settings, arguments.scale_batch)


DROPPED = (
    "settings",
    "process",
    "notebook's TFLOP/s",
    "TFLOP/s",
    "step ms",
    "published vs baseline",
    "peak MiB",
)
"""The columns that a narrow terminal leaves out, the first ones first."""


def _print_table(bench: Bench, table: Table) -> None:
    """Print the table, on a narrow terminal without settings, then why rows did not finish, then notes."""
    columns = bench_columns(bench, table)
    # Why a row did not finish stands below the table.
    columns["state"] = [state_text(row.state) for row in table.rows]
    rows = list(zip(*columns.values(), strict=True))
    header, cells = without_empty_columns(list(columns), rows)
    print_table(header, cells, drop=(*DROPPED, "state"))
    for row in table.rows:
        if row.state != "finished":
            print_line(f"{row.id}: {state_text(row.state)}: {with_sizes(row.reason)}")
    print_lines(table_notes(table))


def _command(arguments: argparse.Namespace) -> str:
    """Return the command line that prints this table again."""
    words = ["trainfast-tui", "bench", arguments.preset]
    for option, values in (
        ("--vary", arguments.vary),
        ("--set", arguments.settings),
        ("--repeat", [str(arguments.repeat)] if arguments.repeat != 1 else []),
        ("--scale-batch", [f"{arguments.scale_batch:g}"] if arguments.scale_batch != 1 else []),
        ("--python", filter(None, [arguments.python])),
    ):
        words += [word for value in values for word in (option, value)]
    words += ["--cold"] if arguments.cold else []
    return shlex.join(words)


@dataclass(frozen=True)
class BenchOptions:
    """The options of `bench` that decide how its rows are run."""

    repeat: int = 1
    """Repetitions of every row."""
    cold: bool = False
    """True if every row takes a process of its own."""
    wait: bool = False
    """True to queue after a run on the same device."""
    python: str | None = None
    """The training Python of a preset's rows; None for the default."""


class BenchRows:
    """Runs the rows of a bench with the command's options."""

    def __init__(self, home: Home, signals: Signals, options: BenchOptions) -> None:
        self._home, self._signals, self._options = home, signals, options

    def run(self, bench: Bench, results_by_row: Mapping[str, list[RowResult]]) -> bool:
        """Run all rows and append to their results; return False if a signal or a stopped row ended the bench early.

        A row whose device another run has taken is not run. Raises DevicesBusy if no row was measured before.
        """
        # Only presets can share a warm process: a script's rows are launched.
        is_cold = self._options.cold or any(planned.plan is not None for planned in bench.rows)
        groups = {} if is_cold else warm_groups(bench)
        total = len(bench.rows) * self._options.repeat
        with open_warm_rows(self._home, self._raise_if_ended, print_holder) as warm:
            for number, planned in enumerate(run_order(bench, self._options.repeat, groups), start=1):
                if needs_no_repeat(results_by_row[planned.id]):
                    continue
                group = groups.get(planned.id)
                try:
                    self._raise_if_ended()
                    print_notice(f"{bench.preset} {number}/{total}: {planned.id}{', warm' if group else ''}")
                    result = self.run_row(planned, group, warm)
                except DevicesBusy as busy:
                    if not any(isinstance(ran, Result) for ran in chain.from_iterable(results_by_row.values())):
                        raise
                    result = busy
                except Cancelled:
                    return False
                if result is None:
                    return False
                if planned.plan is not None and isinstance(result, Result):
                    result = _refused_if_overridden(result, bench.varied)
                results_by_row[planned.id].append(result)
                _print_row_result(result)
                if isinstance(result, Result) and self._ends_bench(result):
                    return False
        return True

    def run_row(self, planned: PlannedRow, group: str | None, warm: WarmRows) -> RowResult | None:
        """Run one row to its end; return the UserError if it cannot run here, None if the terminal has gone.

        Raises DevicesBusy if another run uses the row's device, without --wait; Cancelled if a signal ends a wait.
        """
        try:
            plan = planning.plan_run(planned.spec, self._options.python) if planned.plan is None else planned.plan()
        except UserError as error:
            return error
        if group is not None and warm.has_process(group):
            return warm.train(plan)
        warm.end()
        if group is not None:
            self._start_when_free(plan, lambda plan: warm.start(plan, group))
            return warm.train(plan)

        def start(plan: RunPlan) -> Path:
            predict_memory(plan, self._home, self._signals.received)
            self._raise_if_ended()
            return launch.start(plan, self._home, self._on_wait)

        return follow(self._start_when_free(plan, start), self._signals, interrupt_stops=True)

    def _start_when_free(self, plan: RunPlan, start: Callable[[RunPlan], StartedT]) -> StartedT:
        """Start a process; with --wait retry if another run took the device during the preparation."""
        return start_when_free(plan, self._home, start, wait=self._options.wait, raise_if_ended=self._raise_if_ended)

    def _raise_if_ended(self) -> None:
        """Raise Cancelled after Ctrl-C, or once the terminal is closed."""
        if self._signals.interrupts or self._signals.must_leave:
            raise Cancelled

    def _on_wait(self, holder: str) -> None:
        self._raise_if_ended()
        print_holder(holder)

    def _ends_bench(self, result: Result) -> bool:
        """True after a row that was stopped, or whose failure came with Ctrl-C."""
        return result.state == "stopped" or (result.state != "finished" and bool(self._signals.interrupts))


def _print_row_result(result: RowResult) -> None:
    """Print why a row has no figure; nothing for one that finished."""
    if isinstance(result, UserError):
        state = "not run" if isinstance(result, DevicesBusy) else "refused"
        print_notice(f"{state}: {result.line()}")
    elif result.state != "finished":
        print_notice(f"{state_text(result.state)}: {with_sizes(result.reason)}")


def _refused_if_overridden(result: Result, varied: tuple[str, ...]) -> RowResult:
    """Return the result of a script's row, or the UserError for a value that the script overrode."""
    from trainfast_runner.search.searches import incompatible_reason

    why = incompatible_reason(result, varied)
    return result if why is None else UserError(why, key=result.run_id)


def _csv(bench: Bench, table: Table, command: str) -> str:
    """Return the table as CSV: unrounded figures, empty if absent, and the knobs by which rows differ."""
    # A script's row has only the knobs that were asked for.
    knobs = [name for name in KNOBS_BY_NAME if len({row.knobs.get(name) for row in table.rows}) > 1]
    rows = [_csv_row(table, row, knobs) for row in table.rows]
    lines = io.StringIO()
    writer = csv.DictWriter(lines, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)  # None is an empty cell
    return lines.getvalue()


def _csv_row(table: Table, row: Row, knobs: Sequence[str]) -> dict[str, object]:
    low, high = row.interval_percent or (None, None)
    return {
        "id": plain(row.id),
        "baseline": int(row.id == table.baseline_id),
        "state": row.state,
        "reason": plain(with_sizes(row.reason)),
        "run_id": row.result.run_id if row.result is not None else "",
        "process": process_word(row),
        "samples_per_s": row.rate,
        "vs_baseline_percent": row.vs_baseline_percent,
        "ci_low_percent": low,
        "ci_high_percent": high,
        "step_ms": row.result.step_ms.p50 if row.result is not None else None,
        "peak_bytes": row.peak_bytes,
        "published_samples_per_s": row.published.get("samples_per_s"),
        "ratio": row.ratio,
        **{name: KNOBS_BY_NAME[name].text_of(row.knobs[name]) if name in row.knobs else "" for name in knobs},
    }


def bench_markdown(bench: Bench, table: Table, command: str) -> str:
    """Return the table as Markdown, with the command that makes it again and notes for the reader."""
    return as_markdown(_document(bench, table, Code("The command of this table:", command)))


def _document(bench: Bench, table: Table, command: Block) -> Document:
    columns = bench_columns(bench, table)
    grid = filled_grid(list(columns), zip(*columns.values(), strict=True))
    return Document(bench.title, (command, grid, *map(Prose, table_notes(table))))


WRITERS: dict[str, Callable[[Bench, Table, str], str]] = {
    ".md": bench_markdown,
    ".csv": _csv,
    ".json": lambda bench, table, command: escaped(msgspec.json.encode(table.fields()).decode()) + "\n",
    ".html": lambda bench, table, command: as_html(_document(bench, table, Prose(command))),
}
"""The writer for each ending of a file name."""


BASELINE_SETTINGS = ("batch_size", "seq_len", "precision", "strategy")
"""Settings shown for the baseline; other rows show the settings that differ."""


def bench_columns(bench: Bench, table: Table) -> dict[str, list[str]]:
    """Return the columns as text by heading; the column of a figure that no row has is empty."""
    specs = {planned.id: planned.spec for planned in bench.rows}
    rows = table.rows
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
    columns["process"] = [process_word(row) for row in rows]
    columns["state"] = [_state(row) for row in rows]
    return columns


def _settings(bench: Bench, row_spec: RunSpec, baseline: RunSpec) -> Iterator[str]:
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


def _measured_gain(row: Row) -> str:
    gain = _percent(row.vs_baseline_percent)
    remark = {NOISE: " (noise)", DOUBTFUL: f" {DOUBT_SIGN}"}.get(row.verdict or "", "")
    return f"{gain}{remark}" if gain else ""


def process_word(row: Row) -> str:
    """Return `warm` for a row that shared its process with others, `cold` for one of its own, else empty."""
    return {None: "", True: "warm", False: "cold"}[row.warm]


def _number(value: float | None) -> str:
    return "" if value is None else fmt.number(value)


def _percent(value: float | None) -> str:
    return "" if value is None else fmt.signed_percent(value)


MEASURED_CELLS: dict[str, Callable[[Row, Result], str]] = {
    "samples/s": lambda row, result: _number(row.rate),
    "vs baseline": lambda row, result: _measured_gain(row),
    "95 % CI": lambda row, result: "" if row.interval_percent is None else fmt.signed_interval(*row.interval_percent),
    "step ms": lambda row, result: _number(result.step_ms.p50),
    "peak MiB": lambda row, result: "" if row.peak_bytes is None else f"{row.peak_bytes / 2**20:,.0f}",
    "TFLOP/s": lambda row, result: _number(result.flops.model_tflops_per_device),
    "notebook's TFLOP/s": lambda row, result: _number(result.flops.notebook_tflops_per_device),
}
"""The cell of each measured figure by its heading; empty for an absent reading."""


def _state(row: Row) -> str:
    if row.state == "finished":
        return " ".join(filter(None, ("finished", doubt_words(doubts(row.result) if row.result is not None else ()))))
    return f"{state_text(row.state)}: {row.reason}"


def table_notes(table: Table) -> Iterator[str]:
    """Yield the notes for the reader of the table, one sentence at a time."""
    results = [row.result for row in table.rows if row.result is not None]
    if any(row.published for row in table.rows):
        yield "Published figures were measured on other hardware and software; they are facts to compare with."
    if table.unpublished:
        yield table.unpublished
    if any(result.memory.device_peak_used_bytes is None for result in results):
        yield "Peak MiB is the worst rank's allocations; no device memory could be read."
    if any(result.synthetic_data for result in results):
        yield "Some rows trained on synthetic data: their losses say nothing."
    if any(row.warm for row in table.rows):
        yield "Warm rows trained one after another in one process; --cold gives every row a process of its own."
    if any(not result.conditions.clean for result in results):
        yield "Some runs started before their device had freed the last run's memory; see `trainfast-tui runs show`."

"""`runs list`, `runs show` and `runs compare`: the history, one run, and two runs side by side."""

from __future__ import annotations

import argparse
import itertools
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainfast_runner.errors import UserError, nearest
from trainfast_runner.memory.oom import with_newer_explanation
from trainfast_runner.records.home import Home
from trainfast_runner.records.result import Diagnosis, Result
from trainfast_runner.records.run_directory import STATES, notable_reason, read_result
from trainfast_runner.records.run_file import SCHEMA
from trainfast_runner.records.worker_lines import WARM_ROLES
from trainfast_runner.results.comparison import compare
from trainfast_runner.results.summary import read_joined_steps, step_record
from trainfast_runner.running.follower import Follower
from trainfast_runner.running.history import RunRow, iter_rows
from trainfast_runner.running.settling import final_result, result_or_none_while_live
from trainfast_runner.settings import presets, script_preset
from trainfast_runner.settings.spec import without_search_settings
from trainfast_runner.worker.shared.words import STEP_PHASES
from trainfast_tui.cli.arguments import add_run, directory_of, positive
from trainfast_tui.cli.printing import print_json, print_line, print_lines, print_table, terminal_width
from trainfast_tui.cli.progress import live_record, status_line, summary_lines
from trainfast_tui.text import format as fmt
from trainfast_tui.text.diagnosis_words import (
    diagnosis_lines,
    figure_text,
    no_bottleneck_in_result,
    no_bottleneck_in_run,
)
from trainfast_tui.text.format import ABSENT, DOUBT_SIGN, SYNTHETIC_MARK
from trainfast_tui.text.next_run_words import short_overrides, typed_overrides
from trainfast_tui.text.result_words import comparison_lines
from trainfast_tui.text.search_words import ROLE_WORDS

FIGURES = fmt.figure_headings("SAMPLES", "STEP", "PEAK MEMORY", "TOOK")
HEADER = ("RUN", "STATE", "OVERRIDES", *FIGURES, "STARTED", "NOTE")
DROPPED_COLUMNS = ("NOTE", "STARTED", "TOOK", "STEP", "PEAK MEMORY", "SAMPLES", "OVERRIDES")
"""The columns that a narrow terminal leaves out, the first ones first."""
MAX_OVERRIDES_CELLS = 48
MAX_NOTE_CELLS = 40


def runs_list_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--state", help="only runs in this state: running, finished, oom, failed, ...")
    parser.add_argument("--preset", help="only runs of this preset, NAME or NAME/VARIANT")
    parser.add_argument("--probes", action="store_true", help="also the processes in which searches tried settings")
    parser.add_argument("-n", type=positive, metavar="N", help="only the newest N")
    parser.add_argument("--json", action="store_true", help="print {schema, runs[...]}")


def runs_list(arguments: argparse.Namespace) -> int:
    """Print the runs, newest first."""
    if arguments.state is not None and arguments.state not in STATES:
        words, close = f"there is no state {arguments.state!r}", nearest(arguments.state, STATES)
        raise UserError(words, key="--state", allowed=STATES, nearest=close)
    state, preset, home = arguments.state, arguments.preset, Home()
    all_rows = iter_rows(home, warm_processes=arguments.probes)
    matching = (row for row in all_rows if state in (None, row.state) and preset in (None, row.preset, row.name))
    rows = list(itertools.islice(matching, arguments.n))
    # A script's preset exists if its file does, and any other that ran once did.
    if not rows and preset is not None and script_preset.path_of(preset) is None:
        has_run = any(preset in (row.preset, row.name) for row in iter_rows(home))
        if not has_run:
            presets.load(preset)
    if arguments.json:
        print_json({"schema": SCHEMA, "runs": rows})
    elif not rows:
        is_filtered = arguments.state or arguments.preset
        print_line("no matching runs" if is_filtered else f"no run yet: trainfast-tui run {presets.PLAIN_PRESET}")
    else:
        print_table(HEADER, map(_cells, rows), drop=DROPPED_COLUMNS)
    return 0


def _cells(row: RunRow) -> list[str]:
    started = ABSENT
    if row.started_wall_ns is not None:
        started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row.started_wall_ns / 1e9))
    notes = [
        ROLE_WORDS.get(row.role or "", ""),
        fmt.doubt_words(row.doubts),
        f"on host {row.host}" if row.host else "",
        "unsupervised" if row.supervised is False else "",
        SYNTHETIC_MARK if row.synthetic_data else "",
        fmt.with_sizes(notable_reason(row.state, row.reason)) if row.state != "running" else "",
    ]
    note = "; ".join(filter(None, notes))
    width = terminal_width()
    return [
        row.run_id if row.number is None else str(row.number),
        row.state,  # the name that --state takes
        # On a terminal of 80 columns they stand beside id, state and rate.
        short_overrides(
            without_search_settings(row.overrides, row.role), min(MAX_OVERRIDES_CELLS, (width or PIPE_WIDTH) * 2 // 7)
        ),
        f"{DOUBT_SIGN} " * bool(row.doubts and row.samples_per_s) + fmt.per_second(row.samples_per_s, "samples"),
        fmt.milliseconds(row.step_ms_p50),
        fmt.size(row.peak_allocated_bytes),
        fmt.duration(row.seconds),
        started,
        note if width is None else textwrap.shorten(note, MAX_NOTE_CELLS, placeholder=" …"),
    ]


PIPE_WIDTH = 10_000
"""The width of lines for a pipe, which gets each one whole."""


def runs_show_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_run(parser)
    view = parser.add_mutually_exclusive_group()
    view.add_argument("--steps", action="store_true", help="each step, with the readings of the watched GPUs")
    view.add_argument("--why", action="store_true", help="the bottlenecks, with figures and thresholds")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")


def runs_show(arguments: argparse.Namespace) -> int:
    """Print the run; return 0 however it ended."""
    directory = directory_of(arguments)
    if arguments.steps:
        _print_steps(directory, arguments.json)
        return 0
    if (result := result_or_none_while_live(directory)) is not None:
        result = with_newer_explanation(directory, result)
        record: Result | dict[str, Any] = result
        diagnoses: Sequence[Diagnosis] = result.diagnosis
        nothing = no_bottleneck_in_result(result)
        lines = [*summary_lines(result), _settings_line(result)]
    else:
        snapshot = Follower(directory).poll()
        record, diagnoses, nothing = live_record(snapshot), snapshot.diagnosis, no_bottleneck_in_run(snapshot)
        lines = [f"{snapshot.run_id}  {status_line(snapshot)}"]
        lines.append(f"follow it with: trainfast-tui attach {snapshot.run_id}")
    if arguments.json:
        print_json(record)
    elif arguments.why:
        print_lines(map(fmt.line_text, diagnosis_lines(diagnoses, nothing, terminal_width() or PIPE_WIDTH)))
    else:
        print_lines(lines)
    return 0


def _print_steps(directory: Path, as_json: bool) -> None:
    steps = [step_record(*step) for step in read_joined_steps(directory)]
    result = read_result(directory)
    thinning = None if result is None else result.thinning
    if as_json:
        print_json({"schema": SCHEMA, "run_id": directory.name, "thinning": thinning, "steps": steps})
        return
    print_steps(steps)
    if result is not None and thinning is not None:
        step_count = result.steps.measured + result.steps.warmup
        print_line(f"note: a long run: these are {fmt.count(len(steps))} of its {fmt.count(step_count)} steps")


def _settings_line(result: Result) -> str:
    """Return a run's overrides, or the search that a warm process belongs to."""
    if result.role in WARM_ROLES and result.script is None:
        return f"its search: {result.search_id or 'none recorded'}"
    typed = typed_overrides(without_search_settings(result.overrides, result.role))
    return f"settings: {' '.join(typed)}" if typed else "settings: as the preset sets them"


def runs_compare_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("a", metavar="A", help="the run to compare with: an id, a unique prefix, or last")
    parser.add_argument("b", metavar="B", help="the other run")
    parser.add_argument(
        "--json", action="store_true", help="print {a, b, knobs[], rows[], conditions[], notes[], doubts[]}"
    )


def runs_compare(arguments: argparse.Namespace) -> int:
    """Print the differing settings and figures."""
    home = Home()
    comparison = compare(final_result(home, home.find(arguments.a)), final_result(home, home.find(arguments.b)))
    if arguments.json:
        print_json(comparison)
        return 0
    print_line(f"A  {comparison.a}", f"B  {comparison.b}", "")
    if comparison.a == comparison.b:
        print_line("A and B are one and the same run.", "")
    print_lines(map(fmt.line_text, comparison_lines(comparison, terminal_width() or PIPE_WIDTH)))
    return 0


STEP_FIGURES = {
    "step_ms": "TOOK",
    **{f"{phase}_ms": phase.upper() for phase in STEP_PHASES},
    "thermal": "HEAT",
    "power": "POWER CAP",
    "brake": "BRAKE",
    "sync_boost": "SYNC BOOST",
    "clock_loss_fraction": "CLOCK LOSS",
    "energy_joules": "ENERGY",
    "joules_per_sample": "A SAMPLE",
    "temperature_c": "TEMP AT START",
}
"""The heading of each figure of a step; causes of throttling are in milliseconds of the step."""


def print_steps(steps: Sequence[dict[str, Any]]) -> None:
    """Print a line for each step as `step_record` returns it, without empty columns."""
    if not steps:
        print_line("no step is on record")
        return
    rows = []
    for step in steps:
        throttled_ms = {cause: fmt.milliseconds(value) for cause, value in (step["throttled_ms"] or {}).items()}
        cells = [throttled_ms.get(name) or figure_text(name, step.get(name)) for name in STEP_FIGURES]
        rows.append([fmt.count(step["step"]) + (" warm-up" if step["warmup"] else ""), *cells])
    print_table(*fmt.without_empty_columns(fmt.figure_headings("STEP", *STEP_FIGURES.values()), rows, empty=ABSENT))

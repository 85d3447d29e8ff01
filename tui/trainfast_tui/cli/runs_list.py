"""`runs list`: the history as a table, or one JSON object."""

from __future__ import annotations

import argparse
import itertools
import sys
import textwrap
import time

from trainfast_runner.errors import UserError, nearest
from trainfast_runner.records.home import Home
from trainfast_runner.records.run_file import SCHEMA
from trainfast_runner.records.run_states import STATES, notable_reason
from trainfast_runner.running.history import RunRow, iter_rows
from trainfast_runner.settings import presets
from trainfast_runner.settings.scripts import script_preset
from trainfast_runner.settings.set_by_searches import without_search_settings
from trainfast_tui.cli.arguments import positive
from trainfast_tui.cli.printing.output import print_json, print_line, print_table, terminal_width
from trainfast_tui.text.format import ABSENT, duration, milliseconds, per_second, size, with_sizes
from trainfast_tui.text.overrides import short_overrides
from trainfast_tui.text.search.warm_process import ROLE_WORDS
from trainfast_tui.text.signs import DOUBT_SIGN, SYNTHETIC_MARK, doubt_words
from trainfast_tui.text.tables import figure_headings

FIGURES = figure_headings("SAMPLES", "STEP", "PEAK MEMORY", "TOOK")
HEADER = ("RUN", "STATE", "OVERRIDES", *FIGURES, "STARTED", "NOTE")
DROPPED_COLUMNS = ("NOTE", "STARTED", "TOOK", "STEP", "PEAK MEMORY", "SAMPLES", "OVERRIDES")
"""The columns that a narrow terminal leaves out, the first ones first; the id has the start time."""
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
        raise UserError(
            f"there is no state {arguments.state!r}",
            key="--state",
            allowed=STATES,
            nearest=nearest(arguments.state, STATES),
        )
    matching_rows = (row for row in iter_rows(Home(), warm_processes=arguments.probes) if _matches(row, arguments))
    rows = list(itertools.islice(matching_rows, arguments.n))
    if not rows and arguments.preset is not None:
        _refuse_unknown(arguments.preset, Home())
    if arguments.json:
        print_json({"schema": SCHEMA, "runs": rows})
    elif not rows:
        is_filtered = arguments.state or arguments.preset
        print_line("no matching runs" if is_filtered else f"no run yet: trainfast-tui run {presets.PLAIN_PRESET}")
    else:
        print_table(HEADER, map(_cells, rows), drop=DROPPED_COLUMNS)
    return 0


def _refuse_unknown(preset: str, home: Home) -> None:
    """Raise UserError for a preset that does not exist and never ran. A script's preset exists if its file does."""
    if script_preset.path_of(preset) is None and not any(preset in (row.preset, row.name) for row in iter_rows(home)):
        presets.load(preset)


def _matches(row: RunRow, arguments: argparse.Namespace) -> bool:
    if arguments.state is not None and row.state != arguments.state:
        return False
    return arguments.preset is None or arguments.preset in (row.preset, row.name)


def _cells_for_overrides() -> int:
    """Return the cells beside id, state and rate on a terminal of 80 columns."""
    width = terminal_width()
    return MAX_OVERRIDES_CELLS if width is None else min(MAX_OVERRIDES_CELLS, width * 2 // 7)


def _cut_note(note: str) -> str:
    """Return the note, on a terminal cut to words that leave room for the figures."""
    return textwrap.shorten(note, MAX_NOTE_CELLS, placeholder=" …") if sys.stdout.isatty() else note


def _cells(row: RunRow) -> list[str]:
    started = ABSENT
    if row.started_wall_ns is not None:
        started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row.started_wall_ns / 1e9))
    notes = [
        "" if row.number is None else f"run {row.number}",
        ROLE_WORDS.get(row.role or "", ""),
        doubt_words(row.doubts),
        f"on host {row.host}" if row.host else "",
        "unsupervised" if row.supervised is False else "",
        SYNTHETIC_MARK if row.synthetic_data else "",
        with_sizes(notable_reason(row.state, row.reason)) if row.state != "running" else "",
    ]
    return [
        row.run_id,
        row.state,  # the name that --state takes
        short_overrides(without_search_settings(row.overrides, row.role), _cells_for_overrides()),
        f"{DOUBT_SIGN} " * bool(row.doubts and row.samples_per_s) + per_second(row.samples_per_s, "samples"),
        milliseconds(row.step_ms_p50),
        size(row.peak_allocated_bytes),
        duration(row.seconds),
        started,
        _cut_note("; ".join(note for note in notes if note)),
    ]

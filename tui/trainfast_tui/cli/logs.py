"""`logs`: the output of a run's training, without sequences that could move the terminal's cursor."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from trainfast_runner.errors import UserError
from trainfast_runner.records.output_log import OUTPUT_FILE, GrowingLog, read_log
from trainfast_runner.records.run_directory import is_unfinished
from trainfast_tui.cli.arguments import add_run, directory_of, whole
from trainfast_tui.cli.printing.output import print_json, print_line, print_lines
from trainfast_tui.text.format import plain

LOG_POLL_S = 0.2
"""Seconds between two looks for new output."""


def logs_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_run(parser)
    parser.add_argument("-f", "--follow", action="store_true", help="go on until the run ends")
    parser.add_argument("-n", type=whole, metavar="N", help="only the last N lines")
    parser.add_argument("--json", action="store_true", help="print {run_id, lines[...]}")


def logs(arguments: argparse.Namespace) -> int:
    """Print the log."""
    if arguments.follow and arguments.json:
        raise UserError("logs --json prints one object and -f never ends: take one of them", key="-f")
    directory = directory_of(arguments)
    if arguments.follow:
        return _follow(directory, arguments.n)
    lines = read_log(directory / OUTPUT_FILE, arguments.n)
    if arguments.json:
        print_json({"run_id": directory.name, "lines": [plain(line) for line in lines]})
    else:
        print_lines(lines)
    return 0


def _follow(directory: Path, last_lines: int | None) -> int:
    """Print lines as they come, until the run has ended and all are printed."""
    log = GrowingLog(directory / OUTPUT_FILE, last_lines)
    try:
        while True:
            alive = is_unfinished(directory)
            lines = log.read()
            if lines is not None:
                print_lines(lines)
                sys.stdout.flush()
            elif alive:
                time.sleep(LOG_POLL_S)
            else:
                break
    finally:
        log.close()
    if rest := log.unfinished():
        print_line(rest)
    return 0

"""`logs` and `stop`: the output of a run's training, without control sequences, and its end on request."""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import closing
from pathlib import Path

from trainfast_runner.errors import UserError
from trainfast_runner.records.capped_file import OUTPUT_FILE, GrowingLog, read_log
from trainfast_runner.records.home import Home, conducted_search_of, has_journal
from trainfast_runner.records.run_directory import is_unfinished, read_run_file, state_text
from trainfast_runner.running.follower import Follower
from trainfast_runner.running.present_state import refuse_left_alone
from trainfast_runner.running.settling import result_or_none_while_live
from trainfast_tui.cli.arguments import add_run, directory_of, whole
from trainfast_tui.cli.exit_codes import EXIT_HUNG_UP, EXIT_INTERRUPTED
from trainfast_tui.cli.launching import stop_run
from trainfast_tui.cli.printing import print_json, print_line, print_lines, print_notice
from trainfast_tui.cli.progress import live_record
from trainfast_tui.cli.signals import caught_signals
from trainfast_tui.text.format import plain
from trainfast_tui.text.result_words import headline

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
    with closing(GrowingLog(directory / OUTPUT_FILE, last_lines)) as log:
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
    if rest := log.unfinished():
        print_line(rest)
    return 0


def stop_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "reference", metavar="RUN", nargs="?", help="an id, a unique prefix, a number or last; else the only live run"
    )
    parser.add_argument("--now", action="store_true", help="send SIGKILL at once")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")


def stop(arguments: argparse.Namespace) -> int:
    """Stop the run and return 0 once its processes have ended; 130 if Ctrl-C came first, 129 if the terminal closed."""
    directory = directory_to_stop(arguments.reference)
    run = read_run_file(directory)
    if run is None or not run.has_named_nodes:  # of several nodes each reads the request, wherever it is
        refuse_left_alone(directory)
    result = result_or_none_while_live(directory)
    if result is not None:
        raise UserError(f"{directory.name} is not running: it is {state_text(result.state)}", key=directory.name)
    if (notice := search_notice(directory)) is not None:
        print_notice(notice)
    with caught_signals() as signals:
        result = stop_run(directory, signals, kills=arguments.now)
    if result is None:
        print_notice(f"{directory.name} was asked to stop and has not ended yet")
        if arguments.json:
            print_json(live_record(Follower(directory).poll()))
        return EXIT_HUNG_UP if signals.must_leave else EXIT_INTERRUPTED
    if arguments.json:
        print_json(result)
    else:
        print_line(headline(result))
    return 0


def directory_to_stop(reference: str | None) -> Path:
    """Return the directory of RUN, or of the only live run; raises UserError.

    `last` is also a live process of a search, which no list shows.
    """
    home = Home()
    if reference is None:
        live = [directory.name for directory in home.live_directories()]
        if len(live) != 1:
            words = "stop needs a RUN: several are live" if live else "no run is live"
            raise UserError(words, key="RUN", allowed=live or None)
        return home.directory(live[0])
    newest = home.newest_run_ids(1)
    if reference == "last" and newest and is_unfinished(home.directory(newest[0])):
        return home.directory(newest[0])
    return home.directory(home.find(reference))


def search_notice(directory: Path) -> str | None:
    """Return the words on the live search that ends with this run; None for a run of no search."""
    run_file = read_run_file(directory)
    search = None if run_file is None else conducted_search_of(Home(), run_file)
    if search is None or not has_journal(search):
        return None
    return f"{directory.name} belongs to search {search.name}, which ends with it; the same search command continues it"

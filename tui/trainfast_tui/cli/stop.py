"""`stop`: end a live run, with a countdown to SIGKILL."""

from __future__ import annotations

import argparse
from pathlib import Path

from trainfast_runner.errors import UserError
from trainfast_runner.records.home import Home
from trainfast_runner.records.run_directory import is_unfinished, read_run_file
from trainfast_runner.records.run_states import state_text
from trainfast_runner.records.search_directories import conducted_search_of, has_journal
from trainfast_runner.running.final_result import result_or_none_while_live
from trainfast_runner.running.follower import Follower
from trainfast_runner.running.present_state import refuse_left_alone
from trainfast_tui.cli.arguments import add_run
from trainfast_tui.cli.exit_codes import EXIT_HUNG_UP, EXIT_INTERRUPTED
from trainfast_tui.cli.launching.follow_run import stop_run
from trainfast_tui.cli.printing.output import print_json, print_line, print_notice
from trainfast_tui.cli.printing.run_status import live_record
from trainfast_tui.cli.signals import caught_signals
from trainfast_tui.text.result_figures import headline


def stop_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_run(parser)
    parser.add_argument("--now", action="store_true", help="send SIGKILL at once")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")


def stop(arguments: argparse.Namespace) -> int:
    """Stop the run and return 0 once its processes have ended; 130 if Ctrl-C came first, 129 if the terminal closed."""
    directory = directory_to_stop(arguments.reference)
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


def directory_to_stop(reference: str) -> Path:
    """Return the directory of RUN; `last` is also a live process of a search, which no list shows. Raises UserError."""
    home = Home()
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

"""`attach`: follow a live run as `run` does; Ctrl-C only leaves it."""

from __future__ import annotations

import argparse

from trainfast_runner.errors import UserError
from trainfast_runner.memory.oom.explain_run import with_newer_explanation
from trainfast_runner.records.file_locks import is_alive
from trainfast_runner.records.run_directory import read_run_file
from trainfast_runner.running.final_result import result_or_none_while_live
from trainfast_runner.running.follower import Follower
from trainfast_runner.running.present_state import unfinished_host
from trainfast_tui.cli.arguments import add_run, directory_of
from trainfast_tui.cli.exit_codes import EXIT_HUNG_UP, EXIT_INTERRUPTED
from trainfast_tui.cli.launching.follow_run import follow
from trainfast_tui.cli.printing.output import print_json, print_notice
from trainfast_tui.cli.printing.run_status import live_record
from trainfast_tui.cli.printing.summary import print_result
from trainfast_tui.cli.signals import caught_signals


def attach_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_run(parser)
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object, the last line")


def attach(arguments: argparse.Namespace) -> int:
    """Follow the run and return its exit code; 130 if Ctrl-C left it running, 129 if the terminal was closed."""
    directory = directory_of(arguments)
    result = result_or_none_while_live(directory)
    if result is not None:
        return print_result(with_newer_explanation(directory, result), arguments.json)
    host = unfinished_host(directory, read_run_file(directory))
    if host is not None and not is_alive(directory):
        raise UserError(f"{directory.name} is a run of host {host}: attach to it there", key=directory.name)
    with caught_signals() as signals:
        result = follow(directory, signals, interrupt_stops=False)
    if result is not None:
        return print_result(with_newer_explanation(directory, result), arguments.json)
    if signals.must_leave:
        return EXIT_HUNG_UP
    print_notice(f"left {directory.name} running")
    if arguments.json:
        print_json(live_record(Follower(directory).poll()))
    return EXIT_INTERRUPTED

"""`runs rm`: delete runs; if one is live, nothing is deleted."""

from __future__ import annotations

import argparse

from trainfast_runner.errors import UserError
from trainfast_runner.records.home import Home
from trainfast_runner.records.run_directory import is_alive_after_grace
from trainfast_runner.running.present_state import refuse_left_alone
from trainfast_tui.cli.printing.output import print_json, print_line


def runs_rm_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("references", metavar="RUN", nargs="+", help="ids, unique prefixes, or last")
    parser.add_argument("--json", action="store_true", help="print {removed[...]}")


def runs_rm(arguments: argparse.Namespace) -> int:
    """Delete the runs and print their ids."""
    home = Home()
    ids = list(dict.fromkeys(home.find(reference) for reference in arguments.references))
    for run_id in ids:
        refuse_left_alone(home.directory(run_id), deletes=True)
    live_ids = [run_id for run_id in ids if is_alive_after_grace(home.directory(run_id))]
    if live_ids:
        raise UserError(
            f"{', '.join(live_ids)} {'is' if len(live_ids) == 1 else 'are'} still running; nothing was deleted",
            key=live_ids[0],
            advice=f"trainfast-tui stop {live_ids[0]}",
        )
    for run_id in ids:
        home.remove(run_id)
        if not arguments.json:
            print_line(f"deleted {run_id}")
    if arguments.json:
        print_json({"removed": ids})
    return 0

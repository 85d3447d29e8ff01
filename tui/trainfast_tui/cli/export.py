"""`export`: a run's settings for the user's own script."""

from __future__ import annotations

import argparse
import sys

from trainfast_runner.errors import UserError
from trainfast_runner.export.formats import export
from trainfast_runner.records.run_directory import read_run_file
from trainfast_tui.cli.output import print_json, print_line
from trainfast_tui.cli.reference import add_run, directory_of


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_run(parser)
    parser.add_argument(
        "--to",
        required=True,
        metavar="FORM",
        help="training-args, accelerate, deepspeed (zero runs), torchrun (for a script), command or preset",
    )
    parser.add_argument("--json", action="store_true", help="print {run_id, to, text, left_out}")


def run(arguments: argparse.Namespace) -> int:
    """Print the export, and on stderr the settings that cannot be expressed in this format."""
    directory = directory_of(arguments)
    recorded = read_run_file(directory)
    if recorded is None:
        raise UserError(f"{directory.name} has no readable run.json", key=arguments.reference)
    exported = export(recorded, directory, arguments.to)
    if arguments.json:
        print_json(exported)
        return 0
    print_line(exported.text)
    if exported.left_out and arguments.to == "deepspeed":
        print(f"cannot be expressed in this format: {', '.join(exported.left_out)}", file=sys.stderr)
    return 0

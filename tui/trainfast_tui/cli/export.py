"""`export`: a run's settings for the user's own script, or put into it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from trainfast_runner.errors import UserError
from trainfast_runner.export.formats import Exported, export
from trainfast_runner.export.onto import onto
from trainfast_runner.records.run_directory import read_run_file
from trainfast_tui.cli.output import print_json, print_line
from trainfast_tui.cli.reference import add_run, directory_of
from trainfast_tui.text.format import plain


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_run(parser)
    form = parser.add_mutually_exclusive_group(required=True)
    form.add_argument(
        "--to",
        metavar="FORM",
        help="training-args, accelerate, deepspeed (zero runs), torchrun (for a script), command or preset",
    )
    form.add_argument(
        "--onto", metavar="FILE", help="print the diff that puts the settings into your script, or its shell file"
    )
    parser.add_argument("-o", metavar="DIR", dest="output", help="write the form's files into DIR, replacing none")
    parser.add_argument(
        "--json",
        action="store_true",
        help="print {run_id, to, text, left_out, files}; of --onto {run_id, file, diff, notes}",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the export or the diff, and on stderr what a person has to see to."""
    directory = directory_of(arguments)
    recorded = read_run_file(directory)
    if recorded is None:
        raise UserError(f"{directory.name} has no readable run.json", key=arguments.reference)
    if arguments.onto is not None:
        if arguments.output is not None:
            raise UserError("--onto prints a diff and writes no files", key="-o", advice="without -o")
        found = onto(recorded, Path(arguments.onto))
        if arguments.json:
            print_json(found)
            return 0
        if found.diff:
            print_line(found.diff.removesuffix("\n"))
        already = [] if found.diff or found.notes else [f"{found.file} has these settings already"]
        for note in (*already, *found.notes):
            print(plain(note), file=sys.stderr)
        return 0
    exported = export(recorded, directory, arguments.to)
    written = [] if arguments.output is None else _write(exported, Path(arguments.output))
    if arguments.json:
        print_json(exported)
        return 0
    print_line("\n".join(map(str, written)) or exported.text)
    if exported.left_out and arguments.to == "deepspeed":
        print(f"cannot be expressed in this format: {', '.join(exported.left_out)}", file=sys.stderr)
    return 0


def _write(exported: Exported, folder: Path) -> list[Path]:
    """Write the form's files and return their paths. Raises UserError where one exists or cannot be written."""
    paths = [folder / name for name in exported.files]
    for path in paths:
        if path.exists():
            raise UserError(f"{path} exists already", key="-o", advice="another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in paths:
            path.write_text(exported.files[path.name], encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write into {folder}: {error.strerror}", key="-o") from None
    return paths

"""`export`: print a run's settings for the user's script, or the diff that puts them into it; `--prove` runs them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from trainfast_runner.errors import UserError
from trainfast_runner.export.formats import Exported, export, read_oom_warning
from trainfast_runner.export.onto import OntoFile, onto
from trainfast_runner.records.run_directory import read_run_file
from trainfast_runner.records.run_file import RunFile
from trainfast_tui.cli.arguments import add_run, directory_of
from trainfast_tui.cli.exit_codes import EXIT_FAILED
from trainfast_tui.cli.printing.output import print_exact, print_json, print_line, print_notice
from trainfast_tui.text.format import plain


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_run(parser)
    form = parser.add_mutually_exclusive_group(required=True)
    form.add_argument(
        "--to",
        metavar="FORM",
        help="training-args, accelerate, deepspeed (zero runs), torchrun (for a script), command or preset;"
        " of a script's own run training-args, command or preset",
    )
    form.add_argument(
        "--onto", metavar="FILE", help="print the diff that puts the settings into your script, or its shell file"
    )
    parser.add_argument("-o", metavar="DIR", dest="output", help="write the form's files into DIR, replacing none")
    parser.add_argument(
        "--prove",
        action="store_true",
        help="run the export (if it is for a script, give your command after --), compare settings and speed, and add"
        " the result to the export",
    )
    parser.add_argument("--wait", action="store_true", help="with --prove: wait while another run uses the device")
    parser.add_argument(
        "--json",
        action="store_true",
        help="print {run_id, to, text, left_out, files, proof}; of --onto {run_id, file, diff, notes}",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the export or the diff, and notes on stderr."""
    directory = directory_of(arguments)
    run_file = read_run_file(directory)
    if run_file is None:
        raise UserError(f"{directory.name} has no readable run.json", key=arguments.reference)
    _refuse_options(arguments)
    if arguments.onto is not None:
        change = onto(run_file, Path(arguments.onto))
        _warn_of_oom(run_file, directory)
        _print_diff(change, arguments.json)
        return 0
    exported = export(run_file, directory, arguments.to)
    _warn_of_oom(run_file, directory)
    folder = None if arguments.output is None else Path(arguments.output)
    if folder is not None:
        _refuse_existing(exported, folder, arguments.prove)
    if arguments.prove:
        from trainfast_tui.cli.launching.prove import prove

        code = prove(run_file, directory, exported, arguments.script or (), wait=arguments.wait)
        if code:
            return code
        exported = export(run_file, directory, arguments.to)
    paths = [] if folder is None else _write(exported, folder)
    _print_exported(exported, paths, arguments.json)
    return 0


def _refuse_options(arguments: argparse.Namespace) -> None:
    """Raise UserError for a command or an option that means nothing without --prove, or with --onto."""
    if arguments.script is not None and not arguments.prove:
        raise UserError("a command after -- is for --prove", key="--", advice="export RUN --to FORM --prove -- COMMAND")
    if arguments.wait and not arguments.prove:
        raise UserError("--wait is for the run of --prove", key="--wait", advice="export RUN --to FORM --prove --wait")
    if arguments.onto is None:
        return
    for option, is_used in (("-o", arguments.output is not None), ("--prove", arguments.prove)):
        if is_used:
            raise UserError("--onto only prints a diff", key=option, advice=f"without {option}")


def _print_exported(exported: Exported, paths: Sequence[Path], as_json: bool) -> None:
    """Print the files written, else the text of the export."""
    if as_json:
        print_json(exported)
        return
    if paths:
        print_line("\n".join(map(str, paths)))
    else:
        print_exact(exported.text + "\n")
    if exported.to == "deepspeed":
        # JSON has no comments, so these lines go to stderr.
        for line in (*([exported.proof] if exported.proof else []), *_left_out(exported)):
            print_notice(line)


def _warn_of_oom(run_file: RunFile, directory: Path) -> None:
    """Print a warning on stderr if the run ran out of memory."""
    warning = read_oom_warning(run_file, directory)
    if warning is not None:
        print_notice(plain(f"warning: {warning}"))


def _print_diff(change: OntoFile, as_json: bool) -> None:
    """Print the diff, and on stderr its notes."""
    if as_json:
        print_json(change)
        return
    print_exact(change.diff)
    unchanged_notes = [] if change.diff or change.notes else [f"{change.file} has these settings already"]
    for note in (*unchanged_notes, *change.notes):
        print_notice(plain(note))


def _left_out(exported: Exported) -> list[str]:
    names = ", ".join(exported.left_out)
    return [f"cannot be expressed in this format: {names}"] if names else []


def _refuse_existing(exported: Exported, folder: Path, same_is_replaced: bool) -> None:
    """Raise UserError if the folder is a file or has one of the files.

    With `same_is_replaced` a file of the same text may exist.
    """
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file", key="-o", advice="a folder")
    for name, text in exported.files.items():
        path = folder / name
        if path.exists() and not (same_is_replaced and _has_text(path, text)):
            raise UserError(f"{path} exists already", key="-o", advice="another folder")


def _has_text(path: Path, text: str) -> bool:
    """True if the file has this text."""
    try:
        return path.read_text(encoding="utf-8") == text
    except (OSError, UnicodeDecodeError):
        return False


def _write(exported: Exported, folder: Path) -> list[Path]:
    """Write the form's files and return their paths. Raises UserError if one cannot be written."""
    paths = [folder / name for name in exported.files]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in paths:
            path.write_text(exported.files[path.name], encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write into {folder}: {error.strerror}", key="-o", exit_code=EXIT_FAILED) from None
    return paths

"""`report` and `export`: runs or a search in one file, and a run's settings in the forms of other tools."""

from __future__ import annotations

import argparse
from pathlib import Path

from trainfast_runner.errors import UserError
from trainfast_runner.export.formats import Exported, export_run, read_oom_warning
from trainfast_runner.records.home import Home
from trainfast_runner.records.run_directory import read_run_file
from trainfast_runner.units import counted
from trainfast_tui.cli import printing
from trainfast_tui.cli.arguments import add_run, directory_of
from trainfast_tui.cli.exit_codes import EXIT_FAILED
from trainfast_tui.report.blocks import as_html, as_markdown
from trainfast_tui.report.document import report_document
from trainfast_tui.text.format import size

REPORT_SUFFIXES = (".html", ".md")


def report_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "references", metavar="RUN", nargs="+", help="runs, each an id, a unique prefix of one, or last; or one search"
    )
    parser.add_argument(
        "-o", dest="output", required=True, metavar="FILE", help="the file to write, with the ending .html or .md"
    )
    parser.add_argument("--json", action="store_true", help="print {file, runs[], bytes}")


def report(arguments: argparse.Namespace) -> int:
    """Write the report; a file of that name is replaced, as `bench -o` does."""
    path = printing.output_path(arguments.output, REPORT_SUFFIXES)
    document, run_ids = report_document(Home(), arguments.references)
    text = as_html(document) if path.suffix.lower() == ".html" else as_markdown(document)
    size_bytes = printing.write_output(path, text)
    if arguments.json:
        printing.print_json({"file": str(path), "runs": run_ids, "bytes": size_bytes})
        return 0
    printing.print_line(f"{path}: {counted(len(run_ids), 'run')}, {size(size_bytes)}")
    return 0


def export_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_run(parser)
    parser.add_argument(
        "--to",
        metavar="FORM",
        required=True,
        help="training-args, accelerate, deepspeed (zero runs), torchrun (for a script), command or preset;"
        " of a script's own run training-args, command or preset",
    )
    parser.add_argument("-o", metavar="DIR", dest="output", help="write the form's files into DIR, replacing none")
    parser.add_argument("--json", action="store_true", help="print {run_id, to, text, left_out, files}")


def export(arguments: argparse.Namespace) -> int:
    """Print the export, and notes on stderr."""
    directory = directory_of(arguments)
    run_file = read_run_file(directory)
    if run_file is None:
        raise UserError(f"{directory.name} has no readable run.json", key=arguments.reference)
    exported = export_run(run_file, directory, arguments.to)
    warning = read_oom_warning(run_file, directory)
    if warning is not None:
        printing.print_notice(f"warning: {warning}")
    paths = [] if arguments.output is None else _write(exported, Path(arguments.output))
    if arguments.json:
        printing.print_json(exported)
        return 0
    if paths:
        printing.print_lines(map(str, paths))
    else:
        printing.print_exact(exported.text + "\n")
    if exported.to == "deepspeed" and exported.left_out:
        # JSON has no comments, so this line goes to stderr.
        printing.print_notice(f"cannot be expressed in this format: {', '.join(exported.left_out)}")
    return 0


def _write(exported: Exported, folder: Path) -> list[Path]:
    """Write the form's files and return their paths. Raises UserError if one exists or cannot be written."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file", key="-o", advice="a folder")
    paths = [folder / name for name in exported.files]
    for path in paths:
        if path.exists():
            raise UserError(f"{path} exists already", key="-o", advice="another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in paths:
            path.write_text(exported.files[path.name], encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write into {folder}: {error.strerror}", key="-o", exit_code=EXIT_FAILED) from None
    return paths

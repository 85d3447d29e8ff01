"""`report`: runs or a search in one file, as a page or as Markdown."""

from __future__ import annotations

import argparse

from trainfast_runner.records.home import Home
from trainfast_runner.units import counted
from trainfast_tui.cli.printing.output import print_json, print_line
from trainfast_tui.cli.printing.output_file import output_path, write_output
from trainfast_tui.report.as_html import as_html
from trainfast_tui.report.as_markdown import as_markdown
from trainfast_tui.report.report_document import report_document
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
    path = output_path(arguments.output, REPORT_SUFFIXES)
    document, run_ids = report_document(Home(), arguments.references)
    text = as_html(document) if path.suffix.lower() == ".html" else as_markdown(document)
    size_bytes = write_output(path, text)
    if arguments.json:
        print_json({"file": str(path), "runs": run_ids, "bytes": size_bytes})
        return 0
    print_line(f"{path}: {counted(len(run_ids), 'run')}, {size(size_bytes)}")
    return 0

"""`runs compare`: two runs side by side."""

from __future__ import annotations

import argparse

from trainfast_runner.records.home import Home
from trainfast_runner.results.comparison.difference import ComparisonRow, compare
from trainfast_runner.running.final_result import final_result
from trainfast_tui.cli.printing.output import print_json, print_line, print_table
from trainfast_tui.text.comparison_words import (
    difference_text,
    figure_with_unit,
    interval_text,
    value_text,
    verdict_reasons,
    verdict_words,
)
from trainfast_tui.text.format import ABSENT, signed_percent, with_sizes
from trainfast_tui.text.tables import figure_headings


def runs_compare_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("a", metavar="A", help="the run to compare with: an id, a unique prefix, or last")
    parser.add_argument("b", metavar="B", help="the other run")
    parser.add_argument(
        "--json", action="store_true", help="print {a, b, knobs[], rows[], conditions[], notes[], doubts[]}"
    )


def runs_compare(arguments: argparse.Namespace) -> int:
    """Print the differing settings and figures."""
    home = Home()
    comparison = compare(final_result(home, home.find(arguments.a)), final_result(home, home.find(arguments.b)))
    if arguments.json:
        print_json(comparison)
        return 0
    print_line(f"A  {comparison.a}", f"B  {comparison.b}", "")
    if comparison.a == comparison.b:
        print_line("A and B are one and the same run.", "")
    if (verdict := verdict_words(comparison)) is not None:
        print_line(verdict)
    for reason in verdict_reasons(comparison):
        print_line(f"? {reason}")
    for note in map(with_sizes, comparison.notes):
        print_line(f"note: {note}")
    print_line()
    if comparison.knobs:
        settings = [(name, value_text(name, a), value_text(name, b)) for name, a, b in comparison.knobs]
        print_table(("KNOB", "A", "B"), settings)
    else:
        print_line("the same settings")
    print_line()
    rows = [_cells(row) for row in comparison.rows if row.a is not None or row.b is not None]
    header = ("FIGURE", *figure_headings("A", "B", "CHANGE", "", "95 % CI"), "")
    print_table(header, rows, drop=("95 % CI", "CHANGE"))
    if comparison.conditions:
        print_line()
        cells = [
            (row.label, row.a or ABSENT, row.b or ABSENT, "differs" if row.differs else "")
            for row in comparison.conditions
        ]
        print_table(("CONDITION", "A", "B", ""), cells)
    return 0


def _cells(row: ComparisonRow) -> list[str]:
    percent = "" if row.percent is None else signed_percent(row.percent)
    return [
        row.label,
        figure_with_unit(row.a, row.unit),
        figure_with_unit(row.b, row.unit),
        difference_text(row),
        percent,
        interval_text(row),
        row.verdict,
    ]

"""Aligned tables and pairs of plain text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.cells import cell_len

from trainfast_tui.text.format import to_width

GAP = 2
"""Cells between two columns."""
WIDEST = 120
"""The most cells of a column."""


def table(
    header: Sequence[str], rows: Iterable[Sequence[str]], right: Iterable[int] = (), widest: int = WIDEST
) -> list[str]:
    """Return aligned lines, the header first; columns in `right` are right-aligned, none is over `widest` cells."""
    lines = [list(header), *([*row] for row in rows)]
    widths = [min(widest, max(cell_len(line[index]) for line in lines)) for index in range(len(header))]
    to_the_right = set(right)
    return [
        (" " * GAP)
        .join(
            to_width(cell, widths[index], "right" if index in to_the_right else "left")
            for index, cell in enumerate(line)
        )
        .rstrip()
        for line in lines
    ]


def without_empty_columns(
    header: Sequence[str], rows: Iterable[Sequence[str]], right: Iterable[int] = (), empty: str = ""
) -> tuple[list[str], list[list[str]], list[int]]:
    """Return header, rows and `right` without the columns in which each cell is `empty`; the first column stays."""
    all_rows, right_columns = list(rows), set(right)
    columns = [column for column in range(len(header)) if column == 0 or any(row[column] != empty for row in all_rows)]
    return (
        [header[column] for column in columns],
        [[row[column] for column in columns] for row in all_rows],
        [index for index, column in enumerate(columns) if column in right_columns],
    )


def pairs(rows: Iterable[tuple[str, str]]) -> list[str]:
    """Return `label  value` lines with the values aligned."""
    listed_rows = list(rows)
    width = max((cell_len(label) for label, _ in listed_rows), default=0)
    return [f"{to_width(label, width)}  {value}".rstrip() for label, value in listed_rows]

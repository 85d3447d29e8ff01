"""Aligned tables, and pairs of a label and a value, in plain text."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

from rich.cells import cell_len

from trainfast_tui.text.format import to_width

GAP_CELLS = 2
"""Cells between two columns."""
MAX_COLUMN_CELLS = 120


class FigureHeading(str):
    """The heading of a column of figures, which tables align to the right."""

    __slots__ = ()


def figure_headings(*texts: str) -> tuple[FigureHeading, ...]:
    """Return the headings of neighbouring columns of figures."""
    return tuple(map(FigureHeading, texts))


def figure_columns(header: Iterable[str]) -> frozenset[int]:
    """Return the indexes of the columns of figures."""
    return frozenset(column for column, heading in enumerate(header) if isinstance(heading, FigureHeading))


def table(header: Sequence[str], rows: Iterable[Sequence[str]], max_cells: int = MAX_COLUMN_CELLS) -> list[str]:
    """Return aligned lines, the header first; no column is over `max_cells` wide."""
    lines = [header, *rows]
    widths = [min(max_cells, max(map(cell_len, column))) for column in zip(*lines, strict=True)]
    right = figure_columns(header)
    return [aligned_line(line, widths, right) for line in lines]


def aligned_line(cells: Iterable[str], widths: Iterable[int], right: Container[int]) -> str:
    """Return one line of a table, each cell as wide as its column; columns in `right` are right-aligned."""
    padded = [
        to_width(cell, width, "right" if column in right else "left")
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return (" " * GAP_CELLS).join(padded).rstrip()


def without_empty_columns(
    header: Sequence[str], rows: Iterable[Sequence[str]], empty: str = ""
) -> tuple[list[str], list[list[str]]]:
    """Return header and rows without the columns in which each cell is `empty`; the first column stays."""
    all_rows = list(rows)
    columns = [column for column in range(len(header)) if column == 0 or any(row[column] != empty for row in all_rows)]
    return [header[column] for column in columns], [[row[column] for column in columns] for row in all_rows]


def pair_lines(rows: Iterable[tuple[str, str]]) -> list[str]:
    """Return `label  value` lines with the values aligned."""
    listed_rows = list(rows)
    width = max((cell_len(label) for label, _ in listed_rows), default=0)
    return [f"{to_width(label, width)}  {value}".rstrip() for label, value in listed_rows]

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


def pairs(rows: Iterable[tuple[str, str]]) -> list[str]:
    """Return `label  value` lines with the values aligned."""
    listed = list(rows)
    width = max((cell_len(label) for label, _ in listed), default=0)
    return [f"{to_width(label, width)}  {value}".rstrip() for label, value in listed]

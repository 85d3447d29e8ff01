"""Printing of commands: aligned tables for people, one JSON object as the last line for programs."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from rich.cells import cell_len

from trainfast_tui.text.ascii import to_ascii
from trainfast_tui.text.format import fit, truncate
from trainfast_tui.text.tables import GAP, table


def print_json(value: Any) -> None:
    """Print one line of JSON; takes dicts, lists, Structs and dataclasses."""
    print_line(msgspec.json.encode(value).decode())


def print_line(text: str = "") -> None:
    """Print a line on stdout, in ASCII if its encoding cannot hold the text."""
    print(shown(text, sys.stdout.encoding))


def shown(text: str, encoding: str | None) -> str:
    """Return the text, or its ASCII likeness if `encoding` cannot hold it."""
    try:
        text.encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return to_ascii(text.replace(" °C", " C"))
    return text


def print_table(
    header: Sequence[str],
    rows: Iterable[Sequence[str]],
    right: Iterable[int] = (),
    widest: int = 120,
    drop: Sequence[int] = (),
) -> None:
    """Print a table; a terminal gets lines no longer than it is wide, a pipe whole ones.

    If the terminal is too narrow, the columns in `drop` are left out, the first ones first, so that no figure is cut.
    """
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for line in narrowed(header, [list(row) for row in rows], right, widest, drop, width):
        print_line(line if width is None else truncate(line, width))


def narrowed(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: Iterable[int],
    widest: int,
    drop: Sequence[int],
    width: int | None,
) -> list[str]:
    """Return the lines of a table, columns of `drop` left out until it fits in `width` cells; None is any width."""
    aligned, left_out = set(right), 0
    while True:
        kept = [place for place in range(len(header)) if place not in drop[:left_out]]
        lines = table(
            [header[place] for place in kept],
            [[row[place] for place in kept] for row in rows],
            [new for new, place in enumerate(kept) if place in aligned],
            widest,
        )
        if width is None or left_out == len(drop) or max(map(cell_len, lines)) <= width:
            return lines
        left_out += 1


class GrowingTable:
    """A table that prints its rows as they come, in columns of at least `widths` cells; `drop` as in `print_table`."""

    def __init__(
        self, header: Sequence[str], widths: Sequence[int], right: Iterable[int] = (), drop: Sequence[int] = ()
    ) -> None:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        places = list(range(len(header)))
        self._widths = [max(cell_len(name), cells) for name, cells in zip(header, widths, strict=True)]
        for dropped in drop:
            if width is None or sum(self._widths[place] + GAP for place in places) - GAP <= width:
                break
            places.remove(dropped)
        self._places, self._right, self._width = places, set(right), width
        self.add(header)

    def add(self, row: Sequence[str]) -> None:
        """Print a row; a cell wider than its column moves the rest of its row."""
        cells = []
        for place in self._places:
            width = max(self._widths[place], cell_len(row[place]))
            cells.append(fit(row[place], width, "right" if place in self._right else "left"))
        line = (" " * GAP).join(cells).rstrip()
        print_line(line if self._width is None else truncate(line, self._width))

    def add_note(self, name: str, text: str) -> None:
        """Print a row with words instead of figures."""
        line = f"{fit(name, max(self._widths[0], cell_len(name)))}{' ' * GAP}{text}"
        print_line(line if self._width is None else truncate(line, self._width))

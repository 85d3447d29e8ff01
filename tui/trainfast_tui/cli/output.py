"""How commands print: aligned tables for people, one JSON object as the last line for programs."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from rich.cells import cell_len

from trainfast_tui.format import fit, to_ascii, truncate


def print_json(value: Any) -> None:
    """One line of JSON; takes dicts, lists, Structs and dataclasses."""
    say(msgspec.json.encode(value).decode())


def say(text: str = "") -> None:
    """A line on stdout, in ASCII where the terminal or the pipe cannot take more."""
    print(shown(text, sys.stdout.encoding))


def shown(text: str, encoding: str | None) -> str:
    """The text itself, or its ASCII likeness when `encoding` cannot hold it."""
    try:
        text.encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return to_ascii(text)
    return text


def say_table(
    header: Sequence[str],
    rows: Iterable[Sequence[str]],
    right: Iterable[int] = (),
    widest: int = 120,
    drop: Sequence[int] = (),
) -> None:
    """Print a table; a terminal gets lines no longer than it is wide, a pipe all of them.

    Where it is too narrow the columns in `drop` are left out, the first ones first, so that no figure is cut.
    """
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for line in narrowed(header, [list(row) for row in rows], right, widest, drop, width):
        say(line if width is None else truncate(line, width))


def narrowed(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: Iterable[int],
    widest: int,
    drop: Sequence[int],
    width: int | None,
) -> list[str]:
    """The lines of a table without as many columns of `drop` as it takes to fit in `width` cells; None: all."""
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


def table(
    header: Sequence[str], rows: Iterable[Sequence[str]], right: Iterable[int] = (), widest: int = 120
) -> list[str]:
    """Aligned lines, the header first; columns in `right` are set to the right, none is over `widest` cells."""
    lines = [list(header), *([*row] for row in rows)]
    widths = [min(widest, max(cell_len(line[place]) for line in lines)) for place in range(len(header))]
    to_the_right = set(right)
    return [
        "  ".join(
            fit(cell, widths[place], "right" if place in to_the_right else "left") for place, cell in enumerate(line)
        ).rstrip()
        for line in lines
    ]


def pairs(rows: Iterable[tuple[str, str]]) -> list[str]:
    """`label  value` lines with the values aligned."""
    listed = list(rows)
    width = max((cell_len(label) for label, _ in listed), default=0)
    return [f"{fit(label, width)}  {value}".rstrip() for label, value in listed]

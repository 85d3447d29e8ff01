"""Lines of text in named tones; a widget gives each tone its colour."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from rich.cells import cell_len, set_cell_size

from trainfast_tui.text.format import plain, truncate

Tone = Literal[
    "text",
    "title",
    "muted",
    "primary",
    "secondary",
    "accent",
    "success",
    "warning",
    "error",
    "key",
    "cursor",
    "badge",
    "alarm",
]
"""The name of a style; `cursor`, `badge` and `alarm` have a background of their own."""
Piece = tuple[str, Tone]
"""A text with its tone."""
Line = list[Piece]
"""A line of text, in pieces from left to right."""
LabelledText = tuple[str, str, Tone]
"""A label, a text beside it, and the tone of the text."""


class Section(NamedTuple):
    """A titled part of a text; an entry is kept or left out as a whole."""

    title: str
    entries: list[list[Line]]


def rule(title: str, width: int, note: str = "") -> Line:
    """Return a section title with a line to the right edge, or to a note there."""
    end = f" {note}" if note else ""
    return [(f"{title} ", "title"), ("─" * max(0, width - cell_len(title) - 1 - cell_len(end)) + end, "muted")]


def wrap(text: str, width: int) -> list[str]:
    """Break one paragraph into lines of at most `width` cells; a longer path is broken, another longer word cut."""
    lines: list[str] = []
    line = ""
    for word in plain(text).split():
        # A path that is too long for a line may be broken after any slash.
        parts = re.findall("[^/]*/|[^/]+", word) if cell_len(word) > width else [word]
        for index, part in enumerate(parts):
            longer = f"{line}{'' if index or not line else ' '}{part}"
            if line and cell_len(longer) > width:
                lines.append(line)
                line = ""
            line = longer if line else truncate(part, width)
    return [*lines, line] if line else lines


def paragraph(text: str, width: int, tone: Tone, max_lines: int | None = None) -> list[Line]:
    """Return one paragraph in lines of `width` cells; the last of `max_lines` has a sign that more would follow."""
    lines = wrap(text, max(1, width))
    if max_lines is not None and len(lines) > max_lines:
        lines = [*lines[: max_lines - 1], with_more(lines[max_lines - 1], width)]
    return [[(line, tone)] for line in lines]


def with_more(line: str, width: int) -> str:
    """Return the line, cut to `width` cells with a sign that more would follow."""
    return f"{set_cell_size(line, width - 2).rstrip()} …"


def clamp_scroll(first: int, count: int, room: int) -> int:
    """Return `first` clamped so that `room` of `count` lines can be shown.

    Counted from the end, `first` is the number of lines below.
    """
    return max(0, min(first, count - room))


def moved_cursor(cursor: int, by: int, count: int) -> int:
    """Return the cursor moved `by` of `count` entries, and not past the first or the last."""
    return max(0, min(cursor + by, count - 1))


def hidden_words(above: int, below: int) -> str:
    """Return how many lines are hidden: `4 above, 20 below`; empty if none is."""
    return ", ".join(f"{count} {side}" for count, side in ((above, "above"), (below, "below")) if count)


def labelled(label: Piece, text: str, width: int, tone: Tone = "text") -> list[Line]:
    """Return the text beside its label, in lines of `width` cells; empty without a text."""
    indent = cell_len(label[0])
    first, *rest = wrap(text, max(8, width - indent)) or [""]
    return [[label, (first, tone)], *([(" " * indent + line, tone)] for line in rest)] if text else []


def join_pieces(cells: Iterable[Piece]) -> Line:
    """Join neighbours of one tone into one piece."""
    line: Line = []
    for text, tone in cells:
        if line and line[-1][1] == tone:
            line[-1] = line[-1][0] + text, tone
        else:
            line.append((text, tone))
    return line


def has_all_words(text: str, words: str) -> bool:
    """True if the text contains every one of these words; case does not count."""
    lowered = text.lower()
    return all(word in lowered for word in words.lower().split())


def line_text(line: Line) -> str:
    """Return the line without its tones."""
    return "".join(text for text, _ in line)


def line_length(line: Line) -> int:
    """Return the cells that a line takes."""
    return sum(cell_len(text) for text, _ in line)


def first_fitting(lines: Sequence[Line], width: int) -> Line:
    """Return the first of these lines that fits in `width` cells, else the last."""
    return next((line for line in lines if line_length(line) <= width), lines[-1])

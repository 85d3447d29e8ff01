"""The cells that the terminal shows now, so that only changed cells are sent."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import compress, count, repeat
from operator import ne
from typing import NamedTuple
from weakref import WeakKeyDictionary

from rich.cells import cell_len
from rich.color import ColorSystem
from rich.console import COLOR_SYSTEMS, Console
from rich.style import Style
from textual import _compositor
from textual._compositor import ChopsUpdate, LayoutUpdate
from textual.strip import Strip

MIN_GAP = 8
"""Skipping fewer unchanged cells than this takes more bytes than sending them again."""


CLEAR_SCREEN = "\x1b[m\x1b[r\x1b[?25l\x1b[2J"
"""Reset colours, scroll region and cursor and clear the screen: another program may have changed any of them."""


class Ink(NamedTuple):
    """The SGR codes of a cell (ECMA-48, 8.3.117); an empty code is the terminal's own colour."""

    attributes: str = ""
    foreground: str = ""
    background: str = ""
    is_lined: bool = False
    """True if a blank shows more than its background: an underline, a strike or reversed colours."""


PLAIN_INK = Ink()
Cell = tuple[str, Ink]
"""A character of one cell; a blank that is not lined keeps only its background."""
Row = list[Cell | None]
"""None is a cell with unknown content."""


@lru_cache(maxsize=1024)
def _inks(style: Style | None, system: ColorSystem) -> tuple[Ink, Ink]:
    """Return the codes of a style for letters and for blanks, in the colours the terminal has."""
    if style is None:
        return PLAIN_INK, PLAIN_INK
    lined = style.underline or style.underline2 or style.overline or style.strike or style.reverse
    ink = Ink(
        Strip.render_ansi(style.without_color, system),
        Strip.render_ansi(Style(color=style.color), system),
        Strip.render_ansi(Style(bgcolor=style.bgcolor), system),
        bool(lined or style.frame or style.encircle),
    )
    return ink, ink if ink.is_lined else Ink(background=ink.background)


def cells_of(strip: Strip, console: Console) -> list[Cell] | None:
    """Return the cells of a strip, or None if a character takes two cells or none, or a link belongs to it."""
    system = COLOR_SYSTEMS[console.color_system or "truecolor"]
    cells: list[Cell] = []
    for text, style, _ in strip:
        if cell_len(text) != len(text) or (style is not None and style.link is not None):
            return None
        ink, blank = _inks(style, system)
        if ink is blank or " " not in text:
            cells += zip(text, repeat(ink))
        elif not text.strip(" "):
            cells += [(" ", blank)] * len(text)
        else:
            cells += [(character, blank if character == " " else ink) for character in text]
    return cells


def changed_ranges(before: Sequence[Cell | None], after: Sequence[Cell]) -> list[tuple[int, int]]:
    """Return the half-open ranges in which two rows differ, gaps of less than `MIN_GAP` cells included."""
    spans: list[tuple[int, int]] = []
    if before == after:
        return spans
    start, end = -1, -MIN_GAP
    for at in compress(count(), map(ne, before, after)):
        if at - end >= MIN_GAP:
            if start >= 0:
                spans.append((start, end))
            start = at
        end = at + 1
    return [*spans, (start, end)]


class Pen:
    """Control sequences and text of one update; it begins and ends with the terminal's own colours."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._ink = PLAIN_INK
        self._y = -1

    def move(self, x: int, y: int) -> None:
        """Go to a cell, counted from 0."""
        self._parts.append(f"\x1b[{x + 1}G" if y == self._y else f"\x1b[{y + 1};{x + 1}H")
        self._y = y

    def write(self, cells: Iterable[Cell]) -> None:
        """Draw these cells at the pen's position."""
        parts, ink = self._parts, self._ink
        for character, cell_ink in cells:
            if cell_ink is not ink and cell_ink != ink:
                if character == " " and not cell_ink.is_lined and not ink.is_lined:
                    # A blank does not show the colour and weight of letters.
                    same = cell_ink.background == ink.background
                    cell_ink = ink if same else ink._replace(background=cell_ink.background)
                if cell_ink != ink:
                    parts.append(_change(ink, cell_ink))
                    ink = cell_ink
            parts.append(character)
        self._ink = ink

    def write_whole(self, text: str) -> None:
        """Append text with its own colours; the position after it is unknown."""
        self._reset()
        self._parts.append(text)
        self._y = -1

    def text(self) -> str:
        """Return the whole update."""
        self._reset()
        return "".join(self._parts)

    def _reset(self) -> None:
        if self._ink != PLAIN_INK:
            self._parts.append("\x1b[0m")
            self._ink = PLAIN_INK


def _change(old: Ink, new: Ink) -> str:
    """Return the shortest sequence from one ink to another."""
    is_dropped = (old.foreground and not new.foreground) or (old.background and not new.background)
    if old.attributes != new.attributes or is_dropped:
        codes = ["0" if old != PLAIN_INK else "", new.attributes, new.foreground, new.background]
    else:
        codes = [
            new.foreground if new.foreground != old.foreground else "",
            new.background if new.background != old.background else "",
        ]
    return f"\x1b[{';'.join(filter(None, codes))}m"


class SentCells:
    """The cells that a terminal was sent last."""

    def __init__(self) -> None:
        self._rows: list[Row] = []
        self._clear = ""

    def forget(self) -> None:
        """Forget what the terminal shows; the next update clears it first."""
        self._rows = []
        self._clear = CLEAR_SCREEN

    def draw_all(self, rows: Iterable[Iterable[Strip]], console: Console) -> str:
        """Draw every row, whatever the terminal shows."""
        self._rows = []
        pen = Pen()
        for y, strips in enumerate(rows):
            x = 0
            for strip in strips:
                self._draw(pen, x, y, strip, console)
                x += strip.cell_length
        return self._cleared() + pen.text()

    def draw(self, pieces: Iterable[tuple[int, int, Strip]], console: Console) -> str:
        """Draw strips, each with its column and row, sending only the cells that differ from the terminal's."""
        pen = Pen()
        for x, y, strip in pieces:
            self._draw(pen, x, y, strip, console)
        return self._cleared() + pen.text()

    def _cleared(self) -> str:
        clear, self._clear = self._clear, ""
        return clear

    def _draw(self, pen: Pen, x: int, y: int, strip: Strip, console: Console) -> None:
        end = x + strip.cell_length
        row = self._row(y, end)
        cells = cells_of(strip, console)
        if cells is None:
            row[x:end] = [None] * (end - x)
            pen.move(x, y)
            pen.write_whole(strip.render(console))
            return
        for first, last in changed_ranges(row[x:end], cells):
            pen.move(x + first, y)
            pen.write(cells[first:last])
        row[x:end] = cells

    def _row(self, y: int, width: int) -> Row:
        """Return row `y`, at least `width` cells wide."""
        self._rows += [[] for _ in range(y + 1 - len(self._rows))]
        row = self._rows[y]
        row += [None] * (width - len(row))
        return row


_SENT: WeakKeyDictionary[Console, SentCells] = WeakKeyDictionary()


class TightUpdate(ChopsUpdate):
    """A partial update: Textual 8 sends a changed region whole, this one only its changed cells."""

    def render_segments(self, console: Console) -> str:
        """Return the changed cells as text and control sequences."""
        return _sent(console).draw(self._pieces(), console)

    def _pieces(self) -> Iterator[tuple[int, int, Strip]]:
        for y, first, last in self.spans:
            for end, (x, strip) in zip(self.chop_ends[y], self.chops[y].items(), strict=False):
                if strip is None or x >= last or end <= first:
                    continue
                begin, until = max(x, first), min(end, last)
                yield begin, y, strip if (begin, until) == (x, end) else strip.crop(begin - x, until - x)


class WholeUpdate(LayoutUpdate):
    """A full update, sent when the content of the terminal is unknown."""

    def render_segments(self, console: Console) -> str:
        """Return all cells as text and control sequences."""
        return _sent(console).draw_all(self.strips, console)


def _sent(console: Console) -> SentCells:
    return _SENT.setdefault(console, SentCells())


def forget(console: Console) -> None:
    """Forget what this console's terminal shows: the next frame clears it and sends everything."""
    _sent(console).forget()


def install(*, plain: bool = False) -> None:
    """Make every screen send its updates this way, or with `plain` as Textual does, which has no setting for them."""
    _compositor.ChopsUpdate = ChopsUpdate if plain else TightUpdate  # type: ignore[misc]
    _compositor.LayoutUpdate = LayoutUpdate if plain else WholeUpdate  # type: ignore[misc]

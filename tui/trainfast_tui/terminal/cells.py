"""The cells that the terminal shows now, so that only changed cells are sent."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import compress, count, groupby, repeat
from operator import itemgetter, ne
from weakref import WeakKeyDictionary

from rich.cells import cell_len
from rich.console import Console
from rich.segment import Segment
from rich.style import Style
from textual import _compositor
from textual._compositor import ChopsUpdate, LayoutUpdate
from textual.strip import Strip

MIN_GAP = 8
"""Skipping fewer unchanged cells than this takes more bytes than sending them again."""


CLEAR_SCREEN = "\x1b[m\x1b[r\x1b[?25l\x1b[2J"
"""Reset colours, scroll region and cursor and clear the screen: another program may have changed any of them."""


Cell = tuple[str, Style]
"""A character of one cell; a blank that is not lined keeps only its background."""
Row = list[Cell | None]
"""None is a cell with unknown content."""
PLAIN = Style.null()


@lru_cache(maxsize=1024)
def _blank_style(style: Style) -> Style:
    """Return the visible part of a style of blanks: the background, or all of an underline, a strike or a reverse."""
    is_lined = style.underline or style.underline2 or style.overline or style.strike or style.reverse
    if is_lined or style.frame or style.encircle:
        return style
    return PLAIN if style.bgcolor is None else Style(bgcolor=style.bgcolor)


def cells_of(strip: Strip) -> list[Cell] | None:
    """Return the cells of a strip, or None if a character takes two cells or none, or a link belongs to it."""
    cells: list[Cell] = []
    for text, own_style, _ in strip:
        style = own_style or PLAIN
        if cell_len(text) != len(text) or style.link is not None:
            return None
        blank = _blank_style(style)
        if blank is style or " " not in text:
            cells += zip(text, repeat(style))
        else:
            cells += [(character, blank if character == " " else style) for character in text]
    return cells


def segments_of(cells: Iterable[Cell]) -> list[Segment]:
    """Return the cells in few segments: a blank continues its neighbour's style where only its background shows."""
    segments: list[Segment] = []
    for style, run in groupby(cells, key=itemgetter(1)):
        text = "".join([character for character, _ in run])
        last = segments[-1].style if segments else None
        if last is not None and (style == last or (not text.strip(" ") and _blank_style(last) == style)):
            segments[-1] = Segment(segments[-1].text + text, last)
        else:
            segments.append(Segment(text, style))
    return segments


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
        pieces: list[tuple[int, int, Strip]] = []
        for y, strips in enumerate(rows):
            x = 0
            for strip in strips:
                pieces.append((x, y, strip))
                x += strip.cell_length
        return self.draw(pieces, console)

    def draw(self, pieces: Iterable[tuple[int, int, Strip]], console: Console) -> str:
        """Draw strips, each with its column and row, sending only the cells that differ from the terminal's."""
        parts, self._clear = [Segment(self._clear)], ""
        last_y = -1
        for x, y, strip in pieces:
            end = x + strip.cell_length
            row, cells = self._row(y, end), cells_of(strip)
            if cells is None:
                row[x:end] = [None] * (end - x)
                parts.append(Segment(f"\x1b[{y + 1};{x + 1}H{strip.render(console)}"))
                last_y = -1
                continue
            for first, last in changed_ranges(row[x:end], cells):
                column = x + first + 1
                parts.append(Segment(f"\x1b[{column}G" if y == last_y else f"\x1b[{y + 1};{column}H"))
                parts += segments_of(cells[first:last])
                last_y = y
            row[x:end] = cells
        return Strip(parts).render(console)

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

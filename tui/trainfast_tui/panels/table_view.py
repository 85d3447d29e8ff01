"""A text with a table that scrolls, a chart beside it where there is room, and a cursor among its choices."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rich.cells import cell_len
from textual import events
from textual.events import Key

from trainfast_tui.painting import ListWidget
from trainfast_tui.text import format as fmt


@dataclass(frozen=True)
class TablePage:
    """A text for one width, with a table and a chart."""

    head: list[fmt.Line]
    table: Sequence[fmt.Line] = ()
    """A heading and the rows; empty without a row."""
    foot: Sequence[fmt.Line] = ()
    choices: int = 0
    """The number of lines of head or foot that the cursor moves among."""
    chart: Callable[[int, int], list[fmt.Line]] | None = None
    """Returns a chart of this width and of at most this many lines; empty if it needs more, or has nothing to show."""


MAX_CHART_LINES, WANTED_CHART_LINES = 20, 12
"""The most lines of a chart, and the lines that it takes from a long table."""
KEPT_TABLE_LINES = 4
"""Lines of the table that the chart leaves."""
LEAST_TABLE_LINES = 3
"""A blank line, the heading and one row: with less room for the table the whole page scrolls."""


class TableView(ListWidget):
    """Shows a page. Its keys move the cursor among the choices, else scroll the table, else the whole page."""

    def __init__(self, page: Callable[[int, int, int], TablePage], *, shows_newest: bool = True) -> None:
        """`page` returns the page for a width, a height and a cursor; `shows_newest` begins at the last row."""
        super().__init__()
        self._page, self._shows_newest = page, shows_newest
        self.cursor = 0
        """The choice under the cursor."""
        self._choices = 0
        self._top = 0
        """The first visible line of a page that is longer than the screen."""
        self._rows_below = 0 if shows_newest else sys.maxsize
        """Rows of the table that are hidden below."""
        self._visible_rows = 1
        """Lines of the page, or rows of the table, that the keys for a page move by."""

    def to_top(self) -> None:
        """Show the first lines, with the cursor on the first choice, and the table from its beginning."""
        self.cursor = self._top = 0
        self._rows_below = 0 if self._shows_newest else sys.maxsize

    def action_move(self, by: int) -> None:
        if self._choices:
            self.cursor = fmt.moved_cursor(self.cursor, by, self._choices)
            self.repaint()
        else:
            self._scroll(by)

    def on_click(self, event: events.Click) -> None:
        """Move the cursor to the clicked choice; a click on the choice under the cursor is Enter."""
        before = self.cursor
        choices = {self._row_of(choice): choice for choice in range(self._choices)}
        self.cursor = choices.get(event.y, before)
        if choices.get(event.y) == before:
            self.app.post_message(Key("enter", None))
        self.repaint()

    def _row_of(self, choice: int) -> int:
        """Put the cursor on this choice, and return its line; -1 if it is out of sight."""
        self.cursor = choice
        tones = [[tone for _, tone in line] for line in self.lines(*self.size)]
        return next((y for y, tones_of_line in enumerate(tones) if "cursor" in tones_of_line), -1)

    def action_page(self, by: int) -> None:
        # A page is one of the table, also where the arrows move a cursor.
        self._scroll(by * self._visible_rows)

    def _scroll(self, by: int) -> None:
        self._top += by
        self._rows_below -= by
        self.repaint()

    def lines(self, width: int, height: int) -> list[fmt.Line]:
        page = self._page(width, height, self.cursor)
        self._choices = page.choices
        self.cursor = fmt.moved_cursor(self.cursor, 0, max(1, page.choices))
        foot: list[fmt.Line] = [[], *page.foot] if page.foot else []
        room = height - len(page.head) - len(foot)
        if room < (LEAST_TABLE_LINES if page.table else 0):
            self._visible_rows = max(1, height - 1)
            self._top, lines = fmt.scrolled_page([*page.head, [], *page.table, *foot], self._top, height)
            return lines
        self._top = 0
        beside_table = room - 2 - len(page.table)
        chart_lines = max(beside_table, min(WANTED_CHART_LINES, room - 2 - KEPT_TABLE_LINES))
        chart = page.chart(width, min(MAX_CHART_LINES, chart_lines)) if page.chart is not None else []
        chart = [[], *chart] if chart else []
        return [*page.head, *chart, *self._scrolled_table(page.table, room - len(chart)), *foot]

    def _scrolled_table(self, table: Sequence[fmt.Line], room: int) -> list[fmt.Line]:
        """Return a line that counts the hidden rows, the heading, and the rows in sight."""
        if not table:
            return []
        heading, *rows = table
        self._visible_rows = max(1, min(len(rows), room - 2))
        self._rows_below = fmt.clamp_scroll(self._rows_below, len(rows), self._visible_rows)
        end = len(rows) - self._rows_below
        first = max(0, end - self._visible_rows)
        words = fmt.hidden_words(first, self._rows_below)
        hidden_line: fmt.Line = [(f"more rows: {words}  PgUp PgDn", "key")] if words else []
        return [hidden_line, heading, *rows[first:end]]


class TableRow(NamedTuple):
    """A row of a table, with a note below it."""

    sign: fmt.Piece
    cells: Sequence[str]
    note: str = ""
    tone: fmt.Tone = "text"


LEAST_TEXT_CELLS = 40
"""Cells that the column of texts keeps while there are columns to drop."""


def table_lines(header: Sequence[str], rows: Iterable[TableRow], width: int, dropped: Sequence[str]) -> list[fmt.Line]:
    """Return the header and the rows in columns: the first of `dropped` go until the others fit in `width`.

    Columns of figures (`FigureHeading`) are aligned to the right; the text of the one other column is cut.
    A row of one cell takes the whole width.
    """
    all_rows = [TableRow((" ", "text"), header, tone="muted"), *rows]
    cells = {title: max(cell_len(row.cells[at]) for row in all_rows) + 2 for at, title in enumerate(header)}
    [text_title] = [title for title in header if not isinstance(title, fmt.FigureHeading)]
    for title in (*dropped, ""):
        room = width - 2 - sum(cells.values()) + cells[text_title]
        if not title or room >= min(cells[text_title], LEAST_TEXT_CELLS):
            break
        del cells[title]
    cells[text_title] = min(cells[text_title], max(12, room))
    lines: list[fmt.Line] = []
    for row in all_rows:
        texts = [
            fmt.to_width(text, cells[title] - 2, "right" if isinstance(title, fmt.FigureHeading) else "left")
            for title, text in zip(header, row.cells, strict=True)
            if title in cells
        ]
        if not any(row.cells[1:]):
            texts = [row.cells[0]]
        lines.append([(f"{row.sign[0]} ", row.sign[1]), ("  ".join(texts), row.tone)])
        lines += fmt.labelled(("  └ ", "muted"), row.note, width, "muted")
    return lines

"""The base of the views of searches, as large as the screen: the question of the next search, or a search."""

from __future__ import annotations

from typing import ClassVar, Generic

from trainfast_tui.live.snapshot import SearchSnapshotT
from trainfast_tui.painting.painted import WidgetWithNotice
from trainfast_tui.text.lines import LabelledText, Line, clamp_scroll, hidden_words, labelled, rule


class SearchView(WidgetWithNotice, Generic[SearchSnapshotT]):
    """Shows a search with its table, else a question; the table scrolls, and a text longer than the screen."""

    DEFAULT_CSS = "SearchView { height: 1fr; }"
    TITLE: ClassVar[str]
    """The name of this kind of search, in front of its preset or script."""

    def __init__(self, spec_name: str = "") -> None:
        super().__init__()
        self._search: SearchSnapshotT | None = None
        """The search on the screen; None while a question is there."""
        self._now_ns = 0
        self._spec_name = spec_name
        """The preset or script of the question."""
        self._question: list[LabelledText] = []
        self._top = 0
        """The first visible line of a text that is longer than the screen."""
        self._rows_below = 0
        """Rows of the table that are hidden below."""
        self._visible_rows = 1
        """Lines of the text, or rows of the table, that a page has."""

    def show_search(self, search: SearchSnapshotT, now_ns: int) -> None:
        """Show this search as of `now_ns` (CLOCK_MONOTONIC)."""
        if self._search is None:
            self._top = self._rows_below = 0
        self._search, self._now_ns = search, now_ns
        self.repaint()

    def show_question(self, spec_name: str, rows: list[LabelledText]) -> None:
        """Show these rows about the next search, which trains `spec_name`."""
        if self._search is not None:
            self._top = 0
        self._search, self._spec_name, self._question = None, spec_name, rows
        self.repaint()

    def action_move(self, by: int) -> None:
        self.scroll_lines(by)

    def action_page(self, by: int) -> None:
        self.scroll_lines(by * self._visible_rows)

    def scroll_lines(self, by: int) -> None:
        """Scroll down by lines of a text that is longer than the screen, and by rows of the table."""
        self._top += by
        self._rows_below -= by
        self.repaint()

    def lines(self, width: int, height: int) -> list[Line]:
        notice = self.notice_lines(width)
        if self._search is not None:
            return self.search_lines(self._search, notice, width, height)
        question = [self.title_line(self._spec_name, width)]
        for label, text, tone in self._question:
            question += labelled((label, "accent"), text, width, tone)
        return [*self.scrolled_text(question, height - len(notice)), *notice]

    def search_lines(self, search: SearchSnapshotT, notice: list[Line], width: int, height: int) -> list[Line]:
        """Return the search in lines of `width` cells, with the notice among them."""
        raise NotImplementedError

    def title_line(self, spec_name: str, width: int) -> Line:
        """Return the first line: the kind of search, and its preset or script."""
        return rule(f"{self.TITLE}: {spec_name}", width)

    def scrolled_text(self, text: list[Line], height: int) -> list[Line]:
        """Return the lines of the text that are visible in `height`.

        If not all fit, the last line counts the hidden ones and names the keys.
        """
        self._visible_rows, self._rows_below = max(1, height - 1), 0
        if len(text) <= height:
            self._top = 0
            return text
        room = max(0, height - 1)
        top = self._top = clamp_scroll(self._top, len(text), room)
        words = f"more lines: {hidden_words(top, len(text) - top - room)}  ↑ ↓"
        return [*text[top : top + room], [(words, "key")]]

    def scrolled_table(self, table: list[Line], room: int) -> tuple[list[Line], Line]:
        """Return the title with the rows that fit, the newest unless scrolled, and a line that counts the others."""
        title, *rows = table
        self._visible_rows = max(1, min(len(rows), room - 1))
        self._rows_below = clamp_scroll(self._rows_below, len(rows), self._visible_rows)
        end = len(rows) - self._rows_below
        first = max(0, end - self._visible_rows)
        words = hidden_words(first, self._rows_below)
        hidden_line: Line = [(f"more rows: {words}  PgUp PgDn", "key")] if words else []
        return [title, *rows[first:end]], hidden_line

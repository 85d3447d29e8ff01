"""Widgets drawn from lines of toned text; they show plain text only and send only the cells that changed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.segment import Segment
from textual.geometry import Size

from trainfast_tui.painting.palettes import Palette
from trainfast_tui.painting.row_widget import RowWidget, SegmentRows
from trainfast_tui.text.format import plain, truncate
from trainfast_tui.text.lines import Line, Piece, Tone, paragraph

if TYPE_CHECKING:
    from trainfast_runner.running.follower import RunSnapshot

MAX_ROWS = 100
"""A growing panel asks for no more lines of its text."""


class PaintedWidget(RowWidget):
    """A widget that draws its `lines`; call `repaint` when they have changed."""

    DEFAULT_CSS = "PaintedWidget { height: 1; width: 1fr; }"

    def lines(self, width: int, height: int) -> list[Line]:
        """Return the lines to draw; longer ones are cut, missing ones blank."""
        raise NotImplementedError

    def rows(self, width: int, height: int, palette: Palette) -> SegmentRows:
        lines = self.lines(width, height)[:height] if width and height else []
        return [_row(line, width, palette) for line in [*lines, *([[]] * (height - len(lines)))]]

    def set_height(self, rows: int) -> None:
        """Set the height, unless it stays the same: Textual would lay out the screen again."""
        if self.styles.height is None or self.styles.height.value != rows:
            self.styles.height = rows


class GrowingPanel(PaintedWidget):
    """A panel as high as its text, hidden without any."""

    DEFAULT_CSS = """
    GrowingPanel { height: auto; display: none; }
    GrowingPanel.-shown { display: block; }
    """

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return len(self.lines(width, MAX_ROWS))

    def set_shown(self, is_shown: bool) -> None:
        """Draw again in the height that the text needs now; `is_shown` is False without a text."""
        width, height = self.size
        if width and self.has_class("-shown") == is_shown and len(self.lines(width, MAX_ROWS)) == height:
            self.repaint()
            return
        self.set_class(is_shown, "-shown")
        self._rows = None
        self.refresh(layout=True)


class ShownRunWidget(PaintedWidget):
    """A widget about a run, by the newest snapshot of it."""

    _run: RunSnapshot | None = None

    def show_run(self, run: RunSnapshot | None) -> None:
        """Draw this run from now on."""
        self._run = run
        self.repaint()


class WidgetWithNotice(PaintedWidget):
    """A view that places its `notice_lines` among its own, for screens without a status line."""

    def __init__(self) -> None:
        super().__init__()
        self._notice: Piece = ("", "muted")

    def show_notice(self, text: str, tone: Tone = "text") -> None:
        """Show this notice until the next one; an empty text removes it."""
        self._notice = (text, tone)
        self.repaint()

    def notice_lines(self, width: int, max_lines: int | None = None) -> list[Line]:
        """Return the notice in at most `max_lines` lines of `width` cells; empty without a notice."""
        text, tone = self._notice
        return paragraph(text, width, tone, max_lines)


def _row(line: Line, width: int, palette: Palette) -> list[Segment]:
    row: list[Segment] = []
    room = width
    for text, tone in line:
        text = truncate(plain(text), room)
        if text:
            row.append(Segment(text, palette[tone]))
        room -= cell_len(text)
    if room > 0:
        # The cursor's line is filled to its end.
        filled = line and line[-1][1] == "cursor"
        row.append(Segment(" " * room, palette["cursor" if filled else "text"]))
    return row

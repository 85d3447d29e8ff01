"""A painted view with a line of notice, for screens without a status line."""

from __future__ import annotations

from trainfast_tui.painting.painted import Painted
from trainfast_tui.text.lines import Line, Piece, Tone, paragraph


class PaintedWithNotice(Painted):
    """A painted view that places its `notice_lines` among its own."""

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

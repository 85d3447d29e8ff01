"""Text that may be longer than the screen, with scrolling."""

from __future__ import annotations

import sys
from collections.abc import Callable

from trainfast_tui.painting.painted import PaintedWidget
from trainfast_tui.text.lines import Line, clamp_scroll


class Page(PaintedWidget):
    """Shows the lines that fit of `body`, the whole text in lines of a width; its keys scroll."""

    DEFAULT_CSS = "Page { height: 1fr; }"

    def __init__(self, body: Callable[[int], list[Line]]) -> None:
        super().__init__()
        self._body = body
        self._top = 0

    def action_scroll(self, by: int) -> None:
        """Scroll down by `by` lines."""
        self._top += by
        self.repaint()

    def action_page(self, by: int) -> None:
        """Scroll `by` pages down."""
        self.action_scroll(by * self.size.height)

    def action_end(self, direction: int) -> None:
        """Scroll to the top (-1) or to the bottom (1)."""
        self._top = 0 if direction < 0 else sys.maxsize
        self.repaint()

    def lines(self, width: int, height: int) -> list[Line]:
        body = self._body(width)
        self._top = clamp_scroll(self._top, len(body), height)
        return body[self._top :]

"""Text that may be longer than the screen, shown from a line on."""

from __future__ import annotations

from trainfast_tui.charts.painted import Painted
from trainfast_tui.text.lines import Line


class Page(Painted):
    """Shows what `body` gives, as far as it goes onto the screen."""

    DEFAULT_CSS = "Page { height: 1fr; }"

    def __init__(self, *, ascii: bool) -> None:
        super().__init__(ascii=ascii)
        self._top = 0

    def body(self, width: int) -> list[Line]:
        """All of it, in lines of `width` cells."""
        raise NotImplementedError

    def scroll_lines(self, by: int) -> None:
        """Show `by` lines further down."""
        self._top += by
        self.repaint()

    def lines(self, width: int, height: int) -> list[Line]:
        body = self.body(width)
        self._top = max(0, min(self._top, len(body) - height))
        return body[self._top :]

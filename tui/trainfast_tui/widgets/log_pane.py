"""The last lines that the training printed."""

from __future__ import annotations

from trainfast_tui.charts.painted import Painted
from trainfast_tui.text.lines import Line, rule


class LogPane(Painted):
    """The last lines of what the training prints; scrolls back by pages."""

    DEFAULT_CSS = """
    LogPane { height: 40%; display: none; }
    LogPane.-open { display: block; }
    LogPane.-empty { height: 2; }
    """

    def __init__(self, *, ascii: bool = False, id: str | None = None) -> None:
        super().__init__(ascii=ascii, id=id, classes="-empty")
        self._log: tuple[str, ...] = ()
        self._ended = False
        self._back = 0

    def show(self, log: tuple[str, ...], ended: bool) -> None:
        """Show these lines, newest last; of an `ended` run no more will come."""
        if log is not self._log or ended != self._ended:
            self._log, self._ended = log, ended
            self.set_class(not log, "-empty")
            if self.display:
                self.repaint()

    def scroll_pages(self, by: int) -> None:
        """Older lines (-1) or newer ones (1)."""
        page = max(1, self.size.height - 2)
        self._back = max(0, min(self._back - by * page, len(self._log) - page))
        self.repaint()

    def lines(self, width: int, height: int) -> list[Line]:
        room = height - 1
        self._back = max(0, min(self._back, len(self._log) - room))
        end = len(self._log) - self._back
        shown = self._log[max(0, end - room) : end]
        title = "log" if not self._back else f"log, {self._back} lines back"
        body: list[Line] = [[(line, "text")] for line in shown]
        nothing = "It printed nothing." if self._ended else "Nothing printed yet."
        return [rule(title, width), *(body or [[(nothing, "muted")]])]

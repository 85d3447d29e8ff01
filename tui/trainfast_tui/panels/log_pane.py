"""The log of the training."""

from __future__ import annotations

from trainfast_tui.painting import ListWidget
from trainfast_tui.text.format import Line, clamp_scroll, rule

COMPARED_LINES = 8
"""Lines by which an earlier last line is found again."""


class LogPane(ListWidget):
    """The last lines of the training's output; it scrolls by pages."""

    def __init__(self) -> None:
        super().__init__(classes="-empty")
        self._output: tuple[str, ...] = ()
        self._has_ended = False
        self._lines_back = 0

    def show_log(self, log: tuple[str, ...], has_ended: bool) -> None:
        """Show these lines, newest last; an ended run prints no more."""
        if log is not self._output or has_ended != self._has_ended:
            if self._lines_back:
                # The lines that a person reads stay where they are.
                self._lines_back += added_lines(self._output, log)
            self._output, self._has_ended = log, has_ended
            self.set_class(not log, "-empty")
            if self.display:
                self.repaint()

    def action_log(self) -> None:
        """Show or hide the log."""
        self.toggle_class("-open")

    def action_move(self, by: int) -> None:
        """Scroll to newer (1) or older (-1) lines."""
        self._lines_back = clamp_scroll(self._lines_back - by, len(self._output), self.page_rows)
        self.repaint()

    def lines(self, width: int, height: int) -> list[Line]:
        room = height - 1
        self._lines_back = clamp_scroll(self._lines_back, len(self._output), room)
        end = len(self._output) - self._lines_back
        visible_lines = self._output[max(0, end - room) : end]
        title = "log" if not self._lines_back else f"log, {self._lines_back} lines back"
        body: list[Line] = [[(line, "text")] for line in visible_lines]
        nothing = "The training printed nothing." if self._has_ended else "Nothing printed yet."
        return [rule(title, width), *(body or [[(nothing, "muted")]])]


def added_lines(before: tuple[str, ...], after: tuple[str, ...]) -> int:
    """Return how many lines `after` has below the last one of `before`; 0 if `after` does not continue `before`.

    Both are the newest lines of one log, whose last line may be unfinished.
    """
    whole_lines = before[-1 - COMPARED_LINES : -1]
    if not whole_lines:
        return max(0, len(after) - len(before))
    for end in range(len(after) - 1, len(whole_lines) - 1, -1):
        if after[end - len(whole_lines) : end] == whole_lines:
            return len(after) - end - 1
    return 0

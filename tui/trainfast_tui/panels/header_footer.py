"""The strips of one line at the edges of a screen: header, status and footer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace
from rich.cells import cell_len
from textual import events

from trainfast_runner.records.run_directory import state_text
from trainfast_tui.live.figures import run_label
from trainfast_tui.painting import PaintedWidget
from trainfast_tui.text.format import SYNTHETIC_BADGE, Line, Piece, Tone, followed_run_sign, line_length, paragraph
from trainfast_tui.text.keys import STOP_KEY, Action, Shown

if TYPE_CHECKING:
    from trainfast_runner.running.follower import RunSnapshot


MAX_NOTICE_LINES = 6
TITLE_FROM = 120
"""Columns from which the header has the title of the preset."""


class Header(PaintedWidget):
    """The run on the screen and its state."""

    _run: RunSnapshot | None = None
    _has_read_home = False

    def show_run(self, run: RunSnapshot | None, has_read_home: bool) -> None:
        """Show a run; `has_read_home` is True once runs have been listed, so that their absence is known."""
        self._run, self._has_read_home = run, has_read_home
        self.repaint()

    def lines(self, width: int, height: int) -> list[Line]:
        line: Line = [("trainfast-tui", "title")]
        run = self._run
        if run is None:
            return [[*line, ("  no run yet" if self._has_read_home else "", "muted")]]
        sign, tone = followed_run_sign(run)
        line += [("  ", "text"), (f"{sign} {state_text(run.state)}", tone), (f"  {run_label(run)}", "text")]
        if run.synthetic:
            line += SYNTHETIC_BADGE
        if run.run_file is not None and width >= TITLE_FROM:
            line += [(f"  {run.run_file.title}", "muted")]
        return [line]


class StatusLine(PaintedWidget):
    """The last notice in as many lines as it needs, or the countdown of a stop."""

    _notice: Piece = ("", "muted")
    _countdown = ""

    @property
    def text(self) -> str:
        """The last notice; empty without one."""
        return self._notice[0]

    def show_text(self, text: str, tone: Tone = "text") -> None:
        """Show this notice until the next one."""
        self._notice = (text, tone)
        self.repaint()

    def count_down(self, seconds: float | None) -> None:
        """Show the seconds until SIGKILL; None ends the countdown."""
        if seconds is None:
            self._countdown = ""
        else:
            self._countdown = f" stopping: SIGKILL in {max(0, round(seconds))} s " if seconds > 0 else " SIGKILL now "
        self.repaint()

    def on_resize(self) -> None:
        self.repaint()

    def repaint(self) -> None:
        """Draw again, as high as the notice needs."""
        self.set_class(bool(self.lines_wanted), "-shown")
        self.set_height(max(1, self.lines_wanted))
        super().repaint()

    @property
    def lines_wanted(self) -> int:
        """The number of lines that the notice needs; 0 without one."""
        if not self._countdown and not self.text:
            return 0
        return len(self.lines(self.screen.size.width, 0))

    def lines(self, width: int, height: int) -> list[Line]:
        if self._countdown:
            return [[(self._countdown, "alarm"), (f"  {STOP_KEY} again kills it at once", "muted")]]
        text, tone = self._notice
        return [[self._notice]] if cell_len(text) <= width else paragraph(text, width, tone, MAX_NOTICE_LINES)


class FilterLine(PaintedWidget):
    """Words typed after `/`, which narrow a list with every key; `on_words` gets them."""

    def __init__(self, on_words: Callable[[str], object], *, is_open: bool = False) -> None:
        """A line that `is_open` from the beginning names no keys: it stays open."""
        super().__init__(classes="-shown" if is_open else None)
        self._keys = "" if is_open else "Enter keeps it, Esc shows all"
        self._on_words = on_words
        self._is_open = is_open
        self.words = ""
        self._count = ""

    def open(self) -> None:
        """Take in keys from now on."""
        self._is_open = True
        self.add_class("-shown")
        self.repaint()

    def show_count(self, count: str) -> None:
        """Show how many rows are listed, `3 of 20`."""
        if count != self._count:
            self._count = count
            self.repaint()

    def take_key(self, event: events.Key) -> bool:
        """Take in a key while the line is open, and Esc while it has words; return True if it did."""
        if event.key == "escape" and (self._is_open or self.words):
            self._is_open = False
            self._set_words("")
        elif not self._is_open:
            return False
        elif event.key == "enter":
            self._is_open = False
            self._set_words(self.words)
        elif not self.edit(event):
            return False
        return True

    def edit(self, event: events.Key) -> bool:
        """Change the words by a key; return False if the key does not."""
        if event.key in ("backspace", "ctrl+u"):
            self._set_words(self.words[:-1] if event.key == "backspace" else "")
        elif event.key == "slash" and not self.words:
            pass  # the key that opens other filters
        elif event.is_printable and event.character is not None:
            self._set_words(self.words + event.character)
        else:
            return False
        return True

    def _set_words(self, words: str) -> None:
        self.words = words
        self.set_class(self._is_open or bool(words), "-shown")
        self._on_words(words)
        self.repaint()

    def lines(self, width: int, height: int) -> list[Line]:
        keys = self._keys if self._is_open else "Esc shows all"
        cursor: Piece = ("▏" if self._is_open else "", "accent")
        return [[("/", "key"), (self.words, "title"), cursor, (f"  {self._count}   {keys}", "muted")]]


class Footer(PaintedWidget):
    """The keys of the screen, which can be clicked; at the right the search that is going on, and late frames."""

    def __init__(self, actions: Sequence[Action]) -> None:
        super().__init__()
        self._actions = [action for action in actions if action.shown is Shown.IN_FOOTER]
        self._hidden_ids: frozenset[str] = frozenset()
        self._badge = ""
        self._pace = ""

    def set_actions(self, hidden_ids: Collection[str], labels: Mapping[str, str]) -> None:
        """Hide the actions with these ids and show all others; `labels` are those that depend on the present state."""
        hidden = frozenset(hidden_ids)
        relabelled = [replace(action, label=labels.get(action.id, action.label)) for action in self._actions]
        if (hidden, relabelled) != (self._hidden_ids, self._actions):
            self._hidden_ids, self._actions = hidden, relabelled
            self.repaint()

    def show_state(self, badge: str, pace: str) -> None:
        """Show the search that is going on, and the notice of late frames; both may be empty."""
        if (badge, pace) != (self._badge, self._pace):
            self._badge, self._pace = badge, pace
            self.repaint()

    async def on_click(self, event: events.Click) -> None:
        """Run the action whose words are clicked."""
        x = 0
        for action in self._fitting(self.size.width):
            if x <= event.x < x + _length(action) - 2:
                event.stop()
                await self.app.run_action(action.call, self.app if action.scope == "everywhere" else self.screen)
            x += _length(action)

    def _fitting(self, width: int) -> list[Action]:
        """Return the actions that there is room for: help and the way back matter more than the rarer keys."""
        room = width - sum(len(words) + 2 for words in (self._badge, self._pace) if words)
        shown = [action for action in self._actions if action.id not in self._hidden_ids]
        while len(shown) > 2 and sum(map(_length, shown)) - 2 > room:
            kept = ("help", "back", "leave")
            droppable = [action for action in shown if action.id not in kept] or shown
            shown.remove(droppable[-1])
        return shown

    def lines(self, width: int, height: int) -> list[Line]:
        line: Line = []
        for action in self._fitting(width):
            line += [("  " if line else "", "muted"), (action.key, "key"), (f" {action.label}", "muted")]
        right: Line = [(f"  {self._badge}", "accent")] if self._badge else []
        right += [(f"  {self._pace}", "warning")] if self._pace else []
        return [[*line, (" " * max(0, width - line_length(line) - line_length(right)), "muted"), *right]]


def _length(action: Action) -> int:
    return len(action.key) + len(action.label) + 3

"""The strips of one line at the edges of a screen: header, status and footer."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace
from rich.cells import cell_len

from trainfast_runner.records.run_directory import state_text
from trainfast_tui.painting import PaintedWidget
from trainfast_tui.text.format import SYNTHETIC_BADGE, Line, Piece, Tone, followed_run_sign, paragraph
from trainfast_tui.text.keys import STOP_KEY, Action, Shown

if TYPE_CHECKING:
    from trainfast_runner.running.follower import RunSnapshot


MAX_NOTICE_LINES = 6
TITLE_FROM = 120
"""Columns from which the header has the title of the preset."""


class Header(PaintedWidget):
    """The run on the screen and its state."""

    def __init__(self) -> None:
        super().__init__()
        self._run: RunSnapshot | None = None
        self._has_read_home = False

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
        line += [("  ", "text"), (f"{sign} {state_text(run.state)}", tone), (f"  {run.run_id}", "text")]
        if run.synthetic:
            line += SYNTHETIC_BADGE
        if run.run_file is not None and width >= TITLE_FROM:
            line += [(f"  {run.run_file.title}", "muted")]
        return [line]


class StatusLine(PaintedWidget):
    """The last notice in as many lines as it needs, or the countdown of a stop."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._notice: Piece = ("", "muted")
        self._countdown = ""

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
        self.set_height(self.lines_wanted)
        super().repaint()

    @property
    def lines_wanted(self) -> int:
        """The number of lines that the notice needs."""
        return len(self.lines(self.size.width, 0)) if self.size.width else 1

    def lines(self, width: int, height: int) -> list[Line]:
        if self._countdown:
            return [[(self._countdown, "alarm"), (f"  {STOP_KEY} again kills it at once", "muted")]]
        text, tone = self._notice
        return [[self._notice]] if cell_len(text) <= width else paragraph(text, width, tone, MAX_NOTICE_LINES)


class Footer(PaintedWidget):
    """The keys of the screen, and at the right the notice of late frames."""

    def __init__(self, actions: Sequence[Action]) -> None:
        super().__init__()
        self._actions = [action for action in actions if action.shown is Shown.IN_FOOTER]
        self._hidden_ids: frozenset[str] = frozenset()
        self._pace = ""

    def hide(self, ids: Collection[str]) -> None:
        """Hide the actions with these ids, and show all others."""
        hidden_ids = frozenset(ids)
        if hidden_ids != self._hidden_ids:
            self._hidden_ids = hidden_ids
            self.repaint()

    def relabel(self, action_id: str, label: str) -> None:
        """Give an action another label, for its present effect."""
        changed = [replace(action, label=label) if action.id == action_id else action for action in self._actions]
        if changed != self._actions:
            self._actions = changed
            self.repaint()

    def show_pace(self, words: str) -> None:
        """Show the notice of late frames; empty for none."""
        if words != self._pace:
            self._pace = words
            self.repaint()

    def lines(self, width: int, height: int) -> list[Line]:
        room = width - (len(self._pace) + 1 if self._pace else 0)
        shown = [action for action in self._actions if action.id not in self._hidden_ids]
        # Help and quit matter more than the rarer keys of the screen.
        while len(shown) > 2 and sum(map(_length, shown)) - 2 > room:
            droppable = [action for action in shown if action.scope != "everywhere"] or shown
            shown.remove(droppable[-1])
        line: Line = []
        for action in shown:
            line += [("  " if line else "", "muted"), (action.key, "key"), (f" {action.label}", "muted")]
        if self._pace:
            line += [(" " * (room - sum(map(_length, shown)) + 3), "muted"), (self._pace, "warning")]
        return [line]


def _length(action: Action) -> int:
    return len(action.key) + len(action.label) + 3

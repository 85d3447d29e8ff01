"""The base of every screen: the session, a footer, a status line, and the way to the widgets that own keys."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding
from textual.message import Message as TextualMessage
from textual.screen import Screen

from trainfast_tui.control.messages import Message, Notified, SnapshotTaken
from trainfast_tui.painting import PaintedWidget
from trainfast_tui.panels.header_footer import Footer, StatusLine
from trainfast_tui.text.format import Line, Tone, clamp_scroll
from trainfast_tui.text.keys import actions_of

if TYPE_CHECKING:
    from textual.notifications import SeverityLevel

    from trainfast_runner.errors import UserError
    from trainfast_tui.live.snapshot import Snapshot
    from trainfast_tui.session import Session


@dataclass(eq=False)
class PostedMessage(TextualMessage):
    """Brings a message of a thread into the event loop; of waiting snapshots only the newest is delivered."""

    content: Message

    def can_replace(self, message: TextualMessage) -> bool:
        return all(
            isinstance(posted, PostedMessage) and isinstance(posted.content, SnapshotTaken)
            for posted in (self, message)
        )


def bindings(scope: str) -> list[Binding]:
    """Return Textual's bindings of one screen, or with `everywhere` of the app."""
    return [
        Binding(
            ",".join(action.keys), action.call, action.label, show=False, tooltip=action.help, id=f"{scope}.{action.id}"
        )
        for action in actions_of(scope)
    ]


class AppScreen(Screen[None]):
    """A screen of the app. `SCOPE` names its actions in `text.keys`, which give it its bindings."""

    SCOPE: ClassVar[str]
    OPENS_COMPARISONS: ClassVar[bool] = False
    """True if the screen asks for comparisons, which open above it."""
    DEFAULT_CSS = "AppScreen { layout: vertical; overflow: hidden; }"

    def __init_subclass__(cls, **keywords: Any) -> None:
        if "SCOPE" in vars(cls):
            cls.BINDINGS = [*bindings(cls.SCOPE)]
        super().__init_subclass__(**keywords)

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.session = session

    def post(self, content: Message) -> None:
        """Bring `content` to this screen's, else the app's, `on_posted_message`; from any thread."""
        self.post_message(PostedMessage(content))

    def footer(self) -> Footer:
        """Return the footer with the keys of this screen."""
        return Footer([*actions_of(self.SCOPE), *actions_of("everywhere")])

    def show_snapshot(self, snapshot: Snapshot) -> None:
        """Paint this snapshot."""

    def show_pace(self, words: str) -> None:
        """Show the notice of late frames in the footer."""
        self.query_one(Footer).show_pace(words)

    def show_notice(self, text: str, tone: Tone = "text") -> None:
        """Put a line on the status line, where there is one. Callers use `notify`, unless they need another tone."""
        for status in self.query("#status").results(StatusLine):
            status.show_text(text, tone)

    def notify(
        self,
        message: str,
        *,
        title: str = "",
        severity: SeverityLevel = "information",
        timeout: float | None = None,
        markup: bool = True,
    ) -> None:
        """Put a line on the status line, in place of Textual's toast."""
        self.show_notice(message, "text" if severity == "information" else severity)

    def show_notified(self, notified: Notified) -> None:
        """Put a message of the session on the status line."""
        self.notify(notified.text, severity=notified.severity)

    def show_refusal(self, error: UserError) -> None:
        """Show why something cannot be done."""
        self.notify(error.line_without_option(), severity="error")

    async def action_widget(self, name: str, action: str) -> None:
        """Run the action of a widget that owns a key, wherever the focus is."""
        await self.app.run_action(action, self.query_one(name))

    def action_back(self) -> None:
        self.dismiss()


class PageScreen(AppScreen):
    """A screen of one page of text."""

    def compose(self) -> ComposeResult:
        yield Page(self.body)
        yield self.footer()

    def body(self, width: int) -> list[Line]:
        """Return the whole text, in lines of `width` cells."""
        raise NotImplementedError

    def repaint(self) -> None:
        """Paint the text again."""
        self.query_one(Page).repaint()


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

"""The base of every screen: the session, a footer, a status line, and the way to the widgets that own keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding
from textual.events import Key
from textual.message import Message as TextualMessage
from textual.screen import Screen

from trainfast_runner.errors import UserError
from trainfast_tui.control.messages import Message, Notified, SnapshotTaken
from trainfast_tui.control.threads import start_thread
from trainfast_tui.painting import ListWidget
from trainfast_tui.panels.ask import ask_choice
from trainfast_tui.panels.header_footer import FilterLine, Footer, StatusLine
from trainfast_tui.text.format import Line, Tone, scrolled_page
from trainfast_tui.text.keys import actions_of

if TYPE_CHECKING:
    from textual.notifications import SeverityLevel

    from trainfast_tui.live.snapshot import Snapshot
    from trainfast_tui.session import Session


FORMS = (
    ("training-args", "a block for your own Trainer script"),
    ("accelerate", "a configuration file of accelerate"),
    ("deepspeed", "a configuration file of DeepSpeed, for its zero strategies"),
    ("torchrun", "the command that starts a script with torchrun"),
    ("command", "the command that runs the same here"),
    ("preset", "a preset with every setting"),
)
"""The forms of an export, each with its description."""


class PostedMessage(TextualMessage):
    """Brings a message of a thread into the event loop; of waiting snapshots only the newest is delivered."""

    def __init__(self, content: Message) -> None:
        super().__init__()
        self.content = content

    def can_replace(self, message: TextualMessage) -> bool:
        return all(
            isinstance(posted, PostedMessage) and isinstance(posted.content, SnapshotTaken)
            for posted in (self, message)
        )


def bindings(scope: str) -> list[Binding]:
    """Return Textual's bindings of one screen, or with `everywhere` of the app."""
    return [
        Binding(
            action.bound_keys, action.call, action.label, show=False, tooltip=action.help, id=f"{scope}.{action.id}"
        )
        for action in actions_of(scope)
    ]


class AppScreen(Screen[None]):
    """A screen of the app. `SCOPE` names its actions in `text.keys`, which give it its bindings."""

    BLANK = True
    SCOPE: ClassVar[str]
    OPENS_COMPARISONS: ClassVar[bool] = False
    """True if the screen asks for comparisons, which open above it."""

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

    def compose(self) -> ComposeResult:
        yield from self.content()
        yield FilterLine(self.filter_rows)
        yield StatusLine()
        yield Footer([*actions_of(self.SCOPE), *actions_of("everywhere")])

    def content(self) -> ComposeResult:
        """Yield the widgets above the lines at the bottom of every screen."""
        raise NotImplementedError

    def show_snapshot(self, snapshot: Snapshot) -> None:
        """Paint this snapshot."""

    def filter_rows(self, words: str) -> None:
        """List only the rows that contain all of these words."""
        raise NotImplementedError

    def take_key(self, key: Key) -> bool:
        """Give a key to the filter while it is open, ahead of all bindings; return True if it took the key."""
        return any(line.take_key(key) for line in self.query(FilterLine))

    def answer_run_id(self) -> str | None:
        """Return the id of the run whose settings an export writes; None without one."""
        return None

    def reported(self) -> Sequence[str]:
        """Return the ids of the runs, or of the search, that a report is about; empty without one."""
        run_id = self.answer_run_id()
        return () if run_id is None else (run_id,)

    def action_export(self) -> None:
        """Ask for the form of another tool, and write the settings of the shown run in it."""
        run_id = self.answer_run_id()
        if run_id is None:
            self.notify("There is no run to export yet.", severity="warning")
            return
        session, directory = self.session, self.session.home.directory(run_id)

        def export(form: str) -> None:
            start_thread("export", partial(_export, directory, form, Path(session.cwd)), session.post)

        ask_choice(self.app, f"Export {session.run_words(run_id)} as", FORMS, export)

    def action_report(self) -> None:
        """Write a report of what is shown."""
        ids = self.reported()
        if not ids:
            self.notify("There is nothing to report yet.", severity="warning")
            return
        self.notify("Writing the report…")
        start_thread("report", partial(_report, self.session, ids), self.session.post)

    def action_filter(self) -> None:
        """Open the line for words that narrow the list."""
        self.query_one(FilterLine).open()

    def show_notice(self, text: str, tone: Tone = "text") -> None:
        """Put a line on the status line. Callers use `notify`, unless they need another tone."""
        for status in self.query(StatusLine):
            status.show_text(text, tone)

    def notify(self, message: str, *, severity: SeverityLevel = "information", **options: Any) -> None:
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


def _export(directory: Path, form: str, folder: Path) -> Notified:
    from trainfast_runner.export.formats import export_run
    from trainfast_runner.records.run_directory import read_run_file

    run_file = read_run_file(directory)
    if run_file is None:
        raise UserError(f"{directory.name} has no readable run.json", key=form)
    files = export_run(run_file, directory, form).files
    paths = [_free(folder / name) for name in files]
    for path, text in zip(paths, files.values(), strict=True):
        path.write_text(text, encoding="utf-8")
    return Notified(f"Exported to {', '.join(map(str, paths))}")


def _report(session: Session, references: Sequence[str]) -> Notified:
    from trainfast_tui.report.blocks import as_html
    from trainfast_tui.report.document import report_document

    path = _free(Path(session.cwd) / f"report-{references[-1]}.html")
    path.write_text(as_html(report_document(session.home, references)[0]), encoding="utf-8")
    return Notified(f"Reported in {path}")


def _free(path: Path) -> Path:
    """Return the path, with a number where a file of that name exists already."""
    names = (path.with_stem(f"{path.stem}-{number}") for number in range(2, 1000))
    return path if not path.exists() else next(name for name in names if not name.exists())


class PageScreen(AppScreen):
    """A screen of one page of text."""

    def content(self) -> ComposeResult:
        yield Page(self.body)

    def body(self, width: int) -> list[Line]:
        """Return the whole text, in lines of `width` cells."""
        raise NotImplementedError

    def repaint(self) -> None:
        """Paint the text again."""
        self.query_one(Page).repaint()


class Page(ListWidget):
    """Shows the lines that fit of `body`, the whole text in lines of a width; its keys scroll."""

    def __init__(self, body: Callable[[int], list[Line]]) -> None:
        super().__init__()
        self._body = body
        self._top = 0

    def action_move(self, by: int) -> None:
        """Scroll down by `by` lines."""
        self._top += by
        self.repaint()

    def lines(self, width: int, height: int) -> list[Line]:
        self._top, lines = scrolled_page(self._body(width), self._top, height)
        return lines

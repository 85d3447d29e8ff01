"""The Textual app: shows a session, and brings the messages of its threads to the screens."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from textual import events
from textual.app import SystemCommand
from textual.screen import Screen

from trainfast_runner import units
from trainfast_runner.records.home import Home
from trainfast_tui.control import messages
from trainfast_tui.live.reader import Pacer
from trainfast_tui.live.snapshot import SearchKind
from trainfast_tui.panels.header_footer import Footer
from trainfast_tui.screens.base import AppScreen, PostedMessage, bindings
from trainfast_tui.screens.main import MainScreen
from trainfast_tui.session import Session
from trainfast_tui.terminal import cells, textual_app
from trainfast_tui.terminal.textual_app import TerminalApp
from trainfast_tui.text.keys import ACTIONS, Shown


class TrainfastApp(TerminalApp):
    """The app: its screens read and change the session; the main screen is at the bottom."""

    TITLE = "trainfast-tui"
    BINDINGS = [*bindings("everywhere")]
    ENABLE_COMMAND_PALETTE = True

    def __init__(self, session: Session, *, ascii: bool = False, plain_output: bool = False) -> None:
        super().__init__(ascii=ascii, plain_output=plain_output)
        self.session = session
        session.listener, session.on_change = self.post, self.show_changes
        self._pacer = Pacer()

    def post(self, content: messages.Message) -> None:
        """Bring a message of the session into the event loop; from any thread."""
        self.post_message(PostedMessage(content))

    def get_default_screen(self) -> Screen[Any]:
        return MainScreen(self.session)

    def on_mount(self) -> None:
        self.app_resume_signal.subscribe(self, lambda app: self.action_repaint())
        # Start the threads after the first frame, which needs none of them.
        self.call_after_refresh(self.begin)

    def begin(self) -> None:
        """Start the session's threads, and the collection of garbage, which was off since `cli.parser._open_app`."""
        gc.freeze()
        gc.enable()
        self.session.start()

    def on_unmount(self) -> None:
        self.session.stop()

    @property
    def main(self) -> MainScreen:
        """The main screen, on top or below another."""
        screen = self.screen_stack[0]
        assert isinstance(screen, MainScreen)
        return screen

    @property
    def visible_screen(self) -> AppScreen:
        """The topmost screen that is not a dialog."""
        return next(screen for screen in reversed(self.screen_stack) if isinstance(screen, AppScreen))

    def take_key(self, key: events.Key) -> bool:
        """Give the key to the filter of the visible screen while it is open."""
        return isinstance(self.screen, AppScreen) and self.screen.take_key(key)

    def on_posted_message(self, message: PostedMessage) -> None:
        """Let the session take the message in, then repaint what it has changed."""
        if not self.is_running:
            return  # the screens are gone
        self.show_changes(self.session.receive(message.content))
        match message.content:
            case messages.SnapshotTaken():
                self._show_snapshot(message.content)
            # Textual repaints the whole of a screen for a change of the one below it, which shows its newest on top.
            case messages.NextRunPredicted() if self.visible_screen is self.main:
                self.main.show_predictions()
            case messages.OomExplained() if self.visible_screen is self.main and self.session.snapshot is not None:
                self.main.show_snapshot(self.session.snapshot)
            case messages.RunRefused(error):
                self.main.show_refusal(error)
                if self.visible_screen is not self.main:
                    # A search screen's own refusals are those of its search.
                    words = f"The run was refused: {error.line_without_option()}"
                    self.visible_screen.notify(words, severity="error")
            case messages.SearchRefused(error, kind):
                self._screen_of(kind).show_refusal(error)
            case messages.RunsCompared() as compared:
                from trainfast_tui.screens.compare import CompareScreen

                # A second or a late answer covers no other screen or dialog.
                if isinstance(self.screen, AppScreen) and self.screen.OPENS_COMPARISONS:
                    self.push_screen(CompareScreen(self.session, compared))
            case messages.ThreadFailed(error):
                raise error
            case messages.TerminalLost():
                self.exit(0)

    def show_changes(self, changes: messages.Changes) -> None:
        """Repaint what the session has changed."""
        if changes.next_run:
            self.main.show_next_run(changes.knob)
        # A message of a thread may concern the main screen or the visible one.
        for screen in dict.fromkeys((self.main, self.visible_screen)):
            if changes.refusal is not None:
                screen.show_refusal(changes.refusal)
            for notice in changes.notices:
                if notice.except_on != self.visible_screen.SCOPE:
                    screen.show_notified(notice)

    def _screen_of(self, kind: SearchKind) -> AppScreen:
        """Return the screen of this kind of search, which the help may cover; the main screen if it was left."""
        screens = [screen for screen in self.screen_stack if isinstance(screen, AppScreen)]
        return next((screen for screen in screens if kind == screen.SCOPE), self.main)

    def _show_snapshot(self, message: messages.SnapshotTaken) -> None:
        snapshot, late_s = message.snapshot, (time.monotonic_ns() - message.posted_ns) / 1e9
        trains_on_cpu = snapshot.run is not None and snapshot.run.trains_on_cpu
        self.session.reader.period_s = self._pacer.note(late_s, self.unwritten_texts(), trains_on_cpu=trains_on_cpu)
        # A screen has no widgets while it is opened or left.
        if self.visible_screen.children and self.main.is_ready:
            badge = self.session.searches.badge(snapshot.taken_ns) or self.session.run_control.turn_words
            self.visible_screen.query_one(Footer).show_state(badge, self._pacer.words)
            self.visible_screen.show_snapshot(snapshot)

    def action_help(self) -> None:
        """Open the help of the visible screen, or close the help that is open."""
        from trainfast_tui.screens.help import HelpScreen, help_sections

        if isinstance(self.screen, HelpScreen):
            self.screen.dismiss()
        else:
            self.push_screen(HelpScreen(self.session, partial(help_sections, scope=self.visible_screen.SCOPE)))

    def action_theme(self) -> None:
        self.main.notify(f"theme: {textual_app.next_theme(self)}")

    def action_repaint(self) -> None:
        cells.forget(self.console)
        self.screen.refresh()

    async def action_quit(self) -> None:
        self.exit(0)

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        """Return the commands of this screen for the palette, from `text.keys`."""
        scope = screen.SCOPE if isinstance(screen, AppScreen) else "main"
        for action in ACTIONS:
            if action.shown is not Shown.IN_HELP and action.scope in (scope, "everywhere"):
                prefix = "app" if action.scope == "everywhere" else "screen"
                run = partial(self.run_action, f"{prefix}.{action.call}")
                yield SystemCommand(f"{action.label} ({action.key})", action.help, run)


def run_app(home: Home, *, preset: str | None, python: str | None, ascii: bool, plain_output: bool, mouse: bool) -> int:
    """Open the app and return its exit status; print on leaving what goes on.

    Raises UserError, before anything is drawn, for a preset that cannot be loaded.
    """
    from trainfast_tui.terminal.textual_app import watch_for_hangup

    session = Session(home, preset=preset, python=python)
    if preset is not None and session.refusal is not None:
        raise session.refusal
    app = TrainfastApp(session, ascii=ascii, plain_output=plain_output)
    watch_for_hangup(sys.stdin.fileno(), lambda: session.post(messages.TerminalLost()))
    app.run(mouse=mouse)
    for line in farewell_lines(session):
        print(units.plain(line))
    return app.return_code or 0


def farewell_lines(session: Session) -> Iterator[str]:
    """Return what goes on without the app, and how to come back to it; then the start that ends with the app."""
    search = session.searches.running_kind
    if search is not None and session.searches.of(search).is_starting:
        yield f"A {search.label} search was being started; {search.key} in trainfast-tui shows if it runs."
    elif search is not None:
        yield f"The {search.label} search keeps running without this screen."
        yield f"Come back with: trainfast-tui    then {search.key}"
    shown_id = session.live_run.run_id if session.live_run is not None else None
    # During a search the other live run is its trial.
    for run_id in (shown_id, session.other_live_run_id if search is None else None):
        if run_id is not None:
            yield f"{run_id} goes on without this screen."
            # A line for the command: a terminal of 80 columns would break the id.
            yield from ("Come back with: trainfast-tui", "Follow it with:", f"trainfast-tui attach {run_id}")
    if session.run_control.turn_words:
        yield "The runs in turn end with this screen: no other is started."
    if session.run_control.is_waiting:
        yield "The run that waited was not started."
    elif session.run_control.pending.is_pending:
        yield "A run was being started; see if it runs with: trainfast-tui runs list"

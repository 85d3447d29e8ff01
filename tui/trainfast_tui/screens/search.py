"""The search for the largest batch: started or taken up with the screen, which it outlives."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from textual.app import ComposeResult
from textual.screen import Screen

from trainfast_tui.control.next_run import is_about
from trainfast_tui.screens.shared import OfTheApp
from trainfast_tui.text.batch_search import Choice, limit_notice
from trainfast_tui.text.keys import bindings, of
from trainfast_tui.widgets.batch_search_view import BatchSearchView
from trainfast_tui.widgets.strips import Footer

if TYPE_CHECKING:
    from trainfast_runner.errors import UserError
    from trainfast_runner.search.search_follower import SearchSnapshot
    from trainfast_runner.settings.spec import RunSpec
    from trainfast_tui.app import TrainfastApp


class SearchScreen(OfTheApp, Screen[Choice]):
    """Dismissed with what is to be applied to the knobs, or with None. `spec` is what is searched."""

    SCOPE = "search"
    BINDINGS = [*bindings("search")]
    DEFAULT_CSS = "SearchScreen { layout: vertical; overflow: hidden; }"

    def __init__(self, spec: RunSpec, *, ascii: bool) -> None:
        super().__init__()
        self.spec = spec
        self._ascii = ascii
        self._search: SearchSnapshot | None = None
        self._refused = False
        self._cancel_wanted = False

    def compose(self) -> ComposeResult:
        yield BatchSearchView(self.spec.name, ascii=self._ascii)
        yield Footer([*of("search"), *of("everywhere")], ascii=self._ascii)

    @property
    def ladder(self) -> BatchSearchView:
        return self.query_one(BatchSearchView)

    def on_mount(self) -> None:
        snapshot = self.trainfast.snapshot
        self.ladder.note(limit_notice(self.spec, self.trainfast.machine))
        self.show(self.trainfast.searching.current, snapshot.taken_ns if snapshot is not None else 0)

    def show(self, search: SearchSnapshot | None, now_ns: int = 0) -> None:
        """Paint the newest of the search as of `now_ns` (CLOCK_MONOTONIC); None while it is being started."""
        if search is not None and (self._search is None or self._search.state != search.state):
            # What was said of the state before is over.
            self.say("")
        self._search = search
        waits = search is not None and search.state in ("pausing", "paused")
        footer = self.query_one(Footer)
        footer.relabel("pause", "go on" if waits else "pause")
        self.ladder.show(search, now_ns, self.trainfast.searching.asked_ns)
        self._offer(footer, search)
        if self._cancel_wanted and search is not None and search.is_live:
            self._cancel_wanted = False
            self.action_cancel()

    def _offer(self, footer: Footer, search: SearchSnapshot | None) -> None:
        """The keys that do something now."""
        live = search is not None and search.is_live
        over = search is not None and not live
        useless = {"apply": self.ladder.chosen is None, "pause": over, "again": live}
        footer.leave_out(frozenset(name for name, is_so in useless.items() if is_so))
        footer.relabel("cancel", "back" if over else "cancel")

    def say(self, text: str, tone: str = "text") -> None:
        """A line below the ladder."""
        self.ladder.say(text, tone)

    def refuse(self, problem: UserError) -> None:
        """Say why the search could not be started."""
        self._refused = True
        self.say(f"Refused: {problem.line()}", "error")

    def action_leave(self) -> None:
        if self._search is None or self._search.is_live:
            self.trainfast.main.say("The search goes on; b shows it.")
        self.dismiss(None)

    def action_cancel(self) -> None:
        search = self._search
        if search is not None and search.is_live:
            self.say("Cancelling: what runs is stopped, the journal is kept…", "warning")
            self.trainfast.searching.cancel(search.directory)
        elif search is None and not self._refused:
            # Between being asked for and holding its lock, which takes seconds, there is nothing to end yet.
            self._cancel_wanted = True
            self.say("Cancelling as soon as it is there…", "warning")
        else:
            self.dismiss(None)

    def action_pause(self) -> None:
        search = self._search
        if search is None or not search.is_live:
            self.say("Nothing is going on that could be paused.", "warning")
        elif search.state in ("pausing", "paused"):
            self.say("")
            self.trainfast.searching.resume(search.directory)
        else:
            self.say("")
            self.trainfast.searching.pause(search.directory)

    def action_again(self) -> None:
        search = self._search
        if search is not None and search.is_live:
            self.say("It is going on; Esc cancels it.", "warning")
            return
        if self.trainfast.searching.is_going_on:
            self.say("It is being started.", "warning")
            return
        # Of an interrupted or cancelled search the journal is continued, of an ended one nothing is left to do.
        is_over = search is not None and search.state in ("answered", "nothing_fits")
        self._refused = False
        self.say("")
        self.trainfast.searching.start(self.spec, fresh=is_over, cool_to_c=self.trainfast.control.cool_to_c)
        self.show(None)

    def action_move(self, by: int) -> None:
        self.ladder.move(by)

    def action_apply(self) -> None:
        chosen = self.ladder.chosen
        if chosen is not None:
            self.dismiss(chosen)
        elif self._search is not None and self._search.is_live:
            self.say("There is no answer yet.", "warning")
        else:
            self.say("There is no answer to apply; f5 goes on searching.", "warning")


def open_search(app: TrainfastApp, spec: RunSpec) -> SearchScreen:
    """The screen over the main one; what is chosen there is applied to the knobs."""
    screen = SearchScreen(spec, ascii=app.ascii)
    app.push_screen(screen, partial(_apply, app))
    return screen


def _apply(app: TrainfastApp, chosen: Choice | None) -> None:
    if chosen is None:
        return
    search, next_run = app.searching.current, app.next_run
    same = search is not None and next_run is not None and is_about(search, next_run.spec)
    app.main.apply(chosen.settings)
    if not same:
        app.main.say("Applied, but it was searched with other knobs: it may not fit with these.", "warning")

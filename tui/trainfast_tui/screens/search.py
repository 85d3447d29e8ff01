"""The batch search: asked for, started or resumed on this screen, which it outlives."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from textual.app import ComposeResult

from trainfast_runner.errors import UserError
from trainfast_runner.records.state_words import state_words
from trainfast_runner.search.search_follower import SearchSnapshot
from trainfast_tui.control.messages import Notified
from trainfast_tui.control.next_run import NextRun, is_about
from trainfast_tui.live.snapshot import Snapshot
from trainfast_tui.screens.base import AppScreen
from trainfast_tui.session import Session
from trainfast_tui.text.batch_search import limit_notice, question_rows
from trainfast_tui.text.lines import Tone
from trainfast_tui.widgets.batch_search_view import BatchSearchView
from trainfast_tui.widgets.strips import Footer


class SearchScreen(AppScreen):
    """Shows the search of a next run, or the question of one; Enter starts it, or applies one of its answers."""

    SCOPE = "search"

    def __init__(self, session: Session, next_run: NextRun) -> None:
        super().__init__(session)
        self._next_run = next_run
        self._search: SearchSnapshot | None = None
        self._is_asking = not (session.search.is_going_on or session.has_answer_for_knobs())
        """True while the question of a search is put."""
        self._refused = False
        self._cancel_wanted = False

    def compose(self) -> ComposeResult:
        yield BatchSearchView(self._next_run.spec.name)
        yield self.footer()

    @property
    def view(self) -> BatchSearchView:
        return self.query_one(BatchSearchView)

    def on_mount(self) -> None:
        snapshot = self.session.snapshot
        spec, machine = self._next_run.spec, self.session.machine
        limit = limit_notice(spec, machine, self._next_run.ranks(machine))
        self.view.show_limit(limit)
        if self._is_asking:
            self.view.show_question(question_rows(spec, limit, self._earlier()))
            self._show_useful_keys(self.query_one(Footer), None)
        else:
            self._show(self.session.search.current, snapshot.taken_ns if snapshot is not None else 0)

    def _earlier(self) -> SearchSnapshot | None:
        """The newest search of these knobs; None without one."""
        search = self.session.search.current
        return search if search is not None and is_about(search, self._next_run.spec) else None

    def show_snapshot(self, snapshot: Snapshot) -> None:
        """Paint the newest snapshot of the search."""
        if self.session.search.is_going_on:
            self._is_asking = False
        if not self._is_asking:
            self._show(self.session.search.current, snapshot.taken_ns)

    def _show(self, search: SearchSnapshot | None, now_ns: int = 0) -> None:
        """Paint the search as of `now_ns` (CLOCK_MONOTONIC); None while it is being started."""
        if search is not None and (self._search is None or self._search.state != search.state):
            # A notice about the state before is outdated.
            self.show_notice("")
        self._search = search
        waits = search is not None and search.state in ("pausing", "paused")
        footer = self.query_one(Footer)
        footer.relabel("pause", "go on" if waits else "pause")
        self.view.show(search, now_ns, self.session.search.asked_ns)
        self._show_useful_keys(footer, search)
        if self._cancel_wanted and search is not None and search.is_live:
            self._cancel_wanted = False
            self.action_cancel()

    def _show_useful_keys(self, footer: Footer, search: SearchSnapshot | None) -> None:
        """Leave out of the footer the keys that do nothing now."""
        live = search is not None and search.is_live
        over = search is not None and not live
        useless = {
            "apply": self.view.chosen is None and not self._is_asking,
            "pause": over or self._is_asking,
            "leave": self._is_asking,
            "again": live or self._is_asking,
        }
        footer.leave_out(useless)
        footer.relabel("apply", "start" if self._is_asking else "apply")
        footer.relabel("cancel", "back" if over or self._is_asking else "cancel")

    def show_notice(self, text: str, tone: Tone = "text") -> None:
        """Show a line below the probes."""
        self.view.show_notice(text, tone)

    def refuse(self, error: UserError) -> None:
        """Show why the search cannot be started."""
        self._refused = True
        self.notify(f"Refused: {error.line()}", severity="error")

    def action_leave(self) -> None:
        if not self._is_asking and (self._search is None or self._search.is_live):
            self.session.post(Notified("The search goes on; b shows it."))
        self.dismiss()

    def action_cancel(self) -> None:
        search = self._search
        if search is not None and search.is_live:
            self.notify("Cancelling: the probe is stopped, the journal is kept…", severity="warning")
            self.session.search.cancel(search.directory)
        elif search is None and not self._refused and not self._is_asking:
            # A search takes seconds to start, and cannot be ended before it holds its lock.
            self._cancel_wanted = True
            self.notify("Cancelling as soon as the search has started…", severity="warning")
        else:
            self.dismiss()

    def action_pause(self) -> None:
        search = self._search
        if search is None or not search.is_live:
            self.notify("There is no live search to pause.", severity="warning")
            return
        self.notify("")
        if search.state in ("pausing", "paused"):
            self.session.search.resume(search.directory)
        else:
            self.session.search.pause(search.directory)

    def _start(self, *, fresh: bool = False) -> None:
        """Start the search of the next run; a live run is stopped first if the person agrees."""
        session, run = self.session, self.session.shown_run
        if session.running_search is not None:
            self.notify("Another search is using the device.", severity="warning")
        elif session.runs.is_starting:
            self.notify("A run is starting; press Enter again once it is on the screen.", severity="warning")
        elif run is None or not run.is_live:
            self._begin(None, fresh)
        else:
            question = f"{run.run_id} is {state_words(run.state)} and uses the device. Stop it and search the batch?"
            self.confirm(question, "stop it, then search", partial(self._begin, run.directory, fresh))

    def _begin(self, live: Path | None, fresh: bool) -> None:
        """Start the search once the run in `live` has ended."""
        self._is_asking = self._refused = False
        self.notify("")
        self.session.start_search(self._next_run.spec, live, fresh=fresh)
        self._show(None)

    def action_again(self) -> None:
        if self._is_asking:
            self._start()
            return
        search = self._search
        if search is not None and search.is_live:
            self.notify("The search is live; Esc cancels it.", severity="warning")
            return
        if self.session.search.is_going_on:
            self.notify("The search is starting.", severity="warning")
            return
        # The journal of an interrupted or cancelled search is continued; an answered one leaves nothing to do.
        self._start(fresh=search is not None and search.state in ("answered", "nothing_fits"))

    def action_apply(self) -> None:
        if self._is_asking:
            self._start()
            return
        session, chosen, search = self.session, self.view.chosen, self._search
        if chosen is not None:
            next_run = session.next_run
            same = search is not None and next_run is not None and is_about(search, next_run.spec)
            session.apply(chosen.settings)
            if not same:
                words = "Applied, but the search had other knobs: this may not fit with these."
                session.post(Notified(words, "warning"))
            self.dismiss()
        elif search is not None and search.is_live:
            self.notify("There is no answer yet.", severity="warning")
        else:
            self.notify("There is no answer to apply; f5 continues the search.", severity="warning")

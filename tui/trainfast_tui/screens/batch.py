"""The batch search: asked for, started or resumed on this screen, which it outlives."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from textual.app import ComposeResult

from trainfast_runner.errors import UserError
from trainfast_runner.records.search_states import ANSWERED_STATES, PAUSE_STATES
from trainfast_runner.records.state_words import state_words
from trainfast_runner.search.batch.batch_follower import BatchSnapshot
from trainfast_tui.control.messages import Notified
from trainfast_tui.control.next_run import NextRun
from trainfast_tui.control.same_settings import has_same_settings
from trainfast_tui.live.snapshot import Snapshot
from trainfast_tui.screens.base import AppScreen
from trainfast_tui.session import Session
from trainfast_tui.text.batch_search import batch_question_rows, limit_notice
from trainfast_tui.text.lines import Tone
from trainfast_tui.text.search_kind import SearchKind
from trainfast_tui.widgets.batch_search_view import BatchSearchView
from trainfast_tui.widgets.header_footer import Footer


class BatchScreen(AppScreen):
    """Shows the search of a next run, or the question of one; Enter starts it, or applies one of its answers."""

    SCOPE = "batch"

    def __init__(self, session: Session, next_run: NextRun) -> None:
        super().__init__(session)
        self._next_run = next_run
        self._search: BatchSnapshot | None = None
        self._is_asking = not (session.batch_search.is_active or session.has_answer_for_knobs())
        """True while the question of a search is put."""

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
            self.view.show_question(batch_question_rows(spec, limit, self._earlier()))
            self._show_useful_keys()
        else:
            self._show(self.session.batch_search.current, snapshot.taken_ns if snapshot is not None else 0)

    def _earlier(self) -> BatchSnapshot | None:
        """The newest search of these knobs; None without one."""
        search = self.session.batch_search.current
        return search if search is not None and has_same_settings(search, self._next_run.spec) else None

    def show_snapshot(self, snapshot: Snapshot) -> None:
        """Paint the newest snapshot of the search."""
        if self.session.batch_search.is_active:
            self._is_asking = False
        if not self._is_asking:
            self._show(self.session.batch_search.current, snapshot.taken_ns)

    def _show(self, search: BatchSnapshot | None, now_ns: int = 0) -> None:
        """Paint the search as of `now_ns` (CLOCK_MONOTONIC); None while it is being started."""
        if search is not None and (self._search is None or self._search.state != search.state):
            # A notice about the state before is outdated.
            self.show_notice("")
        self._search = search
        self.view.show_search(search, now_ns, self.session.batch_search.requested_ns)
        self._show_useful_keys()

    def _show_useful_keys(self) -> None:
        """Leave out of the footer the keys that do nothing now, and label the others by what they do."""
        search, footer = self._search, self.query_one(Footer)
        is_active = self.session.batch_search.is_active
        useless = {
            "apply": self.view.offer is None and not self._is_asking,
            "pause": search is None or not search.is_live,
            "cancel": not is_active,
            "again": is_active or self._is_asking,
        }
        footer.leave_out(useless)
        footer.relabel("apply", "start" if self._is_asking else "apply")
        footer.relabel("pause", "resume" if search is not None and search.state in PAUSE_STATES else "pause")
        footer.relabel("again", "restart" if self._has_answer else "resume")
        footer.relabel("leave", "leave" if is_active else "back")

    @property
    def _has_answer(self) -> bool:
        """True if the shown search has an answer, so that another one begins anew."""
        return self._search is not None and self._search.state in ANSWERED_STATES

    def show_notice(self, text: str, tone: Tone = "text") -> None:
        """Show a line below the probes."""
        self.view.show_notice(text, tone)

    def refuse(self, error: UserError) -> None:
        """Show why the search cannot be started."""
        self.notify(f"Refused: {error.line()}", severity="error")
        self._show_useful_keys()

    def action_leave(self) -> None:
        if self.session.batch_search.is_active:
            self.session.post(Notified("The search goes on; b shows it."))
        self.dismiss()

    def action_cancel(self) -> None:
        self.show_notified(self.session.batch_search.stop())

    def action_pause(self) -> None:
        self.show_notified(self.session.batch_search.toggle_pause())

    def _start(self, *, fresh: bool = False) -> None:
        """Start the search of the next run; a live run is stopped first if the person agrees."""
        session, run = self.session, self.session.live_run
        if session.running_search is not None:
            self.notify("Another search is using the device.", severity="warning")
        elif session.runs.is_starting:
            self.notify("A run is starting; press Enter again once it is on the screen.", severity="warning")
        elif run is None:
            self._begin(None, fresh)
        else:
            question = f"{run.run_id} is {state_words(run.state)} and uses the device. Stop it and search the batch?"
            self.confirm(question, "stop it, then search", partial(self._begin, run.directory, fresh))

    def _begin(self, live: Path | None, fresh: bool) -> None:
        """Start the search once the run in `live` has ended."""
        self._is_asking = False
        self.notify("")
        self.session.start_search(SearchKind.BATCH, self._next_run.spec, live, fresh=fresh)
        self._show(None)

    def action_again(self) -> None:
        if self._is_asking:
            self._start()
            return
        search = self._search
        if search is not None and search.is_live:
            self.notify("The search is live; s stops it.", severity="warning")
            return
        if self.session.batch_search.is_active:
            self.notify("The search is starting.", severity="warning")
            return
        # The journal of an interrupted or cancelled search is continued; an answered one leaves nothing to do.
        self._start(fresh=self._has_answer)

    def action_apply(self) -> None:
        if self._is_asking:
            self._start()
            return
        session, offer, search = self.session, self.view.offer, self._search
        if offer is not None:
            next_run = session.next_run
            same = search is not None and next_run is not None and has_same_settings(search, next_run.spec)
            session.set_knobs(offer.settings)
            if not same:
                words = "Applied, but the search had other knobs: this may not fit with these."
                session.post(Notified(words, "warning"))
            self.dismiss()
        elif session.batch_search.is_active:
            # While the knobs are checked, the screen says that; a notice would take its place.
            if search is not None:
                self.notify("There is no answer yet.", severity="warning")
        else:
            self.notify("There is no answer to apply; f5 resumes the search.", severity="warning")

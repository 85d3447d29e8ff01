"""The screen of a search, which outlives it: a question or a search as one page, and what both kinds do alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Generic, NamedTuple

from textual.app import ComposeResult

from trainfast_runner.errors import UserError
from trainfast_runner.records.home import PAUSE_STATES, UNFINISHED_STATES
from trainfast_runner.records.run_directory import state_text
from trainfast_tui.control.messages import Notified
from trainfast_tui.control.search_control import SearchControl
from trainfast_tui.live.snapshot import SearchKind, SearchSnapshotT, Snapshot
from trainfast_tui.next_run.next_run import has_same_model
from trainfast_tui.next_run.sources import next_run_from_search
from trainfast_tui.panels.ask import ask_yes
from trainfast_tui.panels.header_footer import Footer
from trainfast_tui.panels.table_view import TablePage, TableView
from trainfast_tui.screens.base import AppScreen
from trainfast_tui.text.format import LabelledText, elapsed, labelled, rule
from trainfast_tui.text.keys import ASK_VARY, RUN_KEY, key_of

if TYPE_CHECKING:
    from trainfast_runner.search.best_journal import BestRequest
    from trainfast_runner.search.journal import SearchQuestion
    from trainfast_runner.settings.spec import RunSpec
    from trainfast_tui.next_run.next_run import NextRun
    from trainfast_tui.session import Session


class SearchStart(NamedTuple):
    """The search to start, or to continue."""

    spec: RunSpec
    fresh: bool
    """True to start it over."""
    best: BestRequest | None = None
    """The question of a best-fit search."""


class SearchScreen(AppScreen, Generic[SearchSnapshotT]):
    """Shows the followed search of one kind, or the question of the next one."""

    KIND: ClassVar[SearchKind]
    TITLE_WORDS: ClassVar[str]
    """The words before the name of the preset or script."""

    def __init__(self, session: Session, next_run: NextRun) -> None:
        super().__init__(session)
        self._next_run = next_run
        """The next run when the screen was opened, which the question is about."""
        self._search: SearchSnapshotT | None = None
        """The search on the screen; None while the screen asks whether to start one, and while one is starting."""
        current = self.search_control.current
        self._is_asking = not (self.search_control.is_active or (current is not None and self.is_answered_by(current)))
        """True while the screen asks whether to start a search; `_search` is None then."""
        self._now_ns = session.snapshot.taken_ns if session.snapshot is not None else 0
        """CLOCK_MONOTONIC of the newest snapshot."""

    @property
    def search_control(self) -> SearchControl:
        """The session's control of this kind of search."""
        return self.session.searches.of(self.KIND)

    def is_answered_by(self, search: SearchSnapshotT) -> bool:
        """True if this ended search is shown in place of the question."""
        raise NotImplementedError

    def question_rows(self) -> list[LabelledText]:
        """Return the rows that ask for the next search."""
        raise NotImplementedError

    def search_page(self, search: SearchSnapshotT, width: int, cursor: int) -> TablePage:
        """Return a search without its title."""
        raise NotImplementedError

    def search_to_start(self) -> SearchStart:
        """Return the search to start or continue. Raises UserError if the preset of the shown search is gone."""
        raise NotImplementedError

    def useless_keys(self) -> set[str]:
        """Return the ids of the actions that do nothing now, beside those that both kinds have."""
        raise NotImplementedError

    def content(self) -> ComposeResult:
        yield TableView(self.page)

    @property
    def view(self) -> TableView:
        """The view of the search and of its question."""
        return self.query_one(TableView)

    def on_mount(self) -> None:
        self.show_newest()

    def reported(self) -> Sequence[str]:
        return () if self._search is None else (self._search.directory.name,)

    def show_snapshot(self, snapshot: Snapshot) -> None:
        """Paint the newest snapshot of the search."""
        self._now_ns = snapshot.taken_ns
        self.show_newest()

    def show_newest(self) -> None:
        """Paint the followed search as of the newest snapshot, or the question of the next one."""
        if self.search_control.is_active:
            self._is_asking = False
        before, search = self._search, None if self._is_asking else self.search_control.current
        if search is not None and (before is None or before.state != search.state):
            self.notify("")  # a notice about the state before is outdated
        self._search = search
        if (before and before.directory) != (search and search.directory):
            self.view.to_top()
        self.view.repaint()
        self.show_useful_keys()

    def page(self, width: int, height: int, cursor: int) -> TablePage:
        """Return everything to show."""
        search, name = self._search, self._next_run.spec.name
        if search is None:
            rows = self.question_rows()
            if not self._is_asking:
                waited = elapsed(self.search_control.requested_ns, self._now_ns)
                rows = [("", f"The knobs are being checked… {waited}", "text")]
            texts = (labelled((label, "accent"), text, width, tone) for label, text, tone in rows)
            page = TablePage([line for lines in texts for line in lines])
        else:
            name = name if search.question is None else search.question.name
            page = self.search_page(search, width, cursor)
        return replace(page, head=[rule(f"{self.TITLE_WORDS}: {name}", width), *page.head])

    def show_useful_keys(self) -> None:
        """Leave out of the footer the keys that do nothing now, and label the others by their effect."""
        search, is_active = self._search, self.search_control.is_active
        is_live = search is not None and search.is_live
        useless = {
            "pause": not is_live,
            "cancel": not is_active,
            "again": is_active or search is None,
            "export": self.answer_run_id() is None,
            "report": search is None or is_live,
        }
        labels = {
            "apply": "start" if search is None else "apply",
            ASK_VARY: "vary" if search is None else "new question",
            "pause": "resume" if search is not None and search.state in PAUSE_STATES else "pause",
            "leave": "leave" if is_active else "back",
            "again": "continue" if search is not None and search.state in UNFINISHED_STATES else "restart",
        }
        hidden = {name for name, is_useless in useless.items() if is_useless} | self.useless_keys()
        self.query_one(Footer).set_actions(hidden, labels)

    def show_refusal(self, error: UserError) -> None:
        """Show why the search cannot be started; without a search on the screen, ask again."""
        if self._search is None:
            self._is_asking = True
            self.show_newest()
        self.notify(f"Refused: {error.line_without_option()}", severity="error")

    def apply_knobs(self, question: SearchQuestion, knob_texts: Iterable[tuple[str, str]]) -> bool:
        """Give these values to the next run, which becomes one of the search's preset if it trains another; close.

        Return False, with a notice, if that preset is gone or a value is refused.
        """
        session, next_run = self.session, self.session.next_run
        if is_other_model := next_run is None or not has_same_model(question, next_run.spec):
            try:
                next_run = session.set_next_run(next_run_from_search(question))
            except UserError as error:
                self.notify(f"This search trains {question.name}: {error.line_without_option()}", severity="error")
                return False
        assert next_run is not None
        changed = [(name, text) for name, text in knob_texts if next_run.text_of(name) != text]
        is_applied = not changed or session.set_knobs(changed)
        if is_applied and is_other_model:
            session.post(Notified(f"The next run is now {question.name} with its search's answer; {RUN_KEY} runs it"))
        elif not changed:
            session.post(Notified(f"The next run has the answer already; {RUN_KEY} runs it"))
        self.dismiss()
        return is_applied

    def start_search(self) -> None:
        """Start or continue the search; a live run is stopped first if the person agrees."""
        run = self.session.live_run
        if self.search_control.is_active:
            self.notify("The search is starting.", severity="warning")
        elif run is None:
            self._start_after(None)
        else:
            label = self.session.run_words(run.run_id)
            words = f"{label} is {state_text(run.state)} and uses the device."
            question = f"{words} Stop it and start the {self.KIND.label} search?"
            ask_yes(self.app, question, "stop it, then search", partial(self._start_after, run.directory))

    def _start_after(self, run_to_stop: Path | None) -> None:
        """Start or continue the search once `run_to_stop` has ended."""
        try:
            spec, fresh, best = self.search_to_start()
        except UserError as error:
            self.show_refusal(error)
            return
        self.notify("")
        self.session.start_search(self.KIND, spec, run_to_stop, fresh=fresh, best=best)
        self.show_newest()

    def action_again(self) -> None:
        if self._search is not None and self._search.is_live:
            self.notify(f"The search is live; {key_of(self.SCOPE, 'cancel')} stops it.", severity="warning")
        else:
            self.start_search()

    def action_pause(self) -> None:
        self.show_notified(self.search_control.toggle_pause())

    def action_cancel(self) -> None:
        self.show_notified(self.search_control.stop())

    def action_leave(self) -> None:
        if self.search_control.is_active:
            self.session.post(Notified(f"The search goes on; {self.KIND.key} shows it."))
        self.dismiss()

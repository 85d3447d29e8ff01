"""The screen on which a batch search is asked for, started and continued; the search outlives the screen."""

from __future__ import annotations

from collections.abc import Mapping

from textual.app import ComposeResult

from trainfast_runner.errors import UserError
from trainfast_runner.machine.cgroup import read_host_free_bytes
from trainfast_runner.records.search_states import ANSWERED_STATES
from trainfast_runner.search.batch.batch_follower import BatchSnapshot
from trainfast_runner.settings.spec import RunSpec
from trainfast_tui.control.batch_control import BatchControl
from trainfast_tui.control.messages import Notified
from trainfast_tui.next_run.next_run import NextRun
from trainfast_tui.next_run.same_settings import has_same_settings
from trainfast_tui.next_run.sources import next_run_from_search
from trainfast_tui.screens.search import SearchScreen
from trainfast_tui.session import Session
from trainfast_tui.text.keys import RUN_KEY, key_of
from trainfast_tui.text.search.batch_question import batch_question_rows, limit_notice
from trainfast_tui.widgets.search.batch_view import BatchView


class BatchScreen(SearchScreen[BatchSnapshot]):
    """Shows the search of the next run, or its question; Enter starts the search, or applies one of its answers."""

    SCOPE = "batch"

    def __init__(self, session: Session, next_run: NextRun) -> None:
        super().__init__(session)
        self._next_run = next_run
        machine = session.machine
        self._limit = limit_notice(next_run.spec, machine, next_run.ranks(machine), read_host_free_bytes())
        """The notice of the memory limit when the screen was opened, for the question and the start."""
        search = self._search_of_same_settings()
        has_answer = search is not None and search.state in ANSWERED_STATES
        self._is_asking = not (self.search_control.is_active or has_answer)
        """True while the screen asks whether to start a search; `_search` is None then.

        With neither a question nor a search on the screen, the search is starting.
        """

    def compose(self) -> ComposeResult:
        yield BatchView(self._next_run.spec.name)
        yield self.footer()

    @property
    def view(self) -> BatchView:
        return self.query_one(BatchView)

    @property
    def search_control(self) -> BatchControl:
        return self.session.searches.batch

    def on_mount(self) -> None:
        if self._is_asking:
            self._ask()
        else:
            self._show_search(self.search_control.current)

    def _ask(self) -> None:
        """Ask whether to start a search of the next run's knobs."""
        self._is_asking = True
        rows = batch_question_rows(self._next_run.spec, self._limit, self._search_of_same_settings())
        self.view.show_question(self._next_run.spec.name, rows)
        self.show_useful_keys()

    def show_refusal(self, error: UserError) -> None:
        """Show why the search cannot be started; without a search on the screen, ask again."""
        if self._search is None:
            self._ask()
        super().show_refusal(error)

    def _search_of_same_settings(self) -> BatchSnapshot | None:
        """Return the followed search if it has the next run's settings; else None."""
        search = self.search_control.current
        return search if search is not None and has_same_settings(search, self._next_run.spec) else None

    def show_newest(self) -> None:
        if self.search_control.is_active:
            self._is_asking = False
        if not self._is_asking:
            self._show_search(self.search_control.current)

    def _show_search(self, search: BatchSnapshot | None) -> None:
        """Paint the search as of the newest snapshot; None while it is being started."""
        self.keep_search(search)
        if search is not None:
            self.view.show_search(search, self._now_ns)
        else:
            self.view.show_question(self._next_run.spec.name, [self.starting_row(), ("", self._limit, "warning")])
        self.show_useful_keys()

    def hidden_actions(self) -> set[str]:
        hidden = set()
        if self.view.offer is None and not self._is_asking:
            hidden.add("apply")
        if self.search_control.is_active or self._is_asking:
            hidden.add("again")
        return hidden

    def action_labels(self) -> Mapping[str, str]:
        return {
            "apply": "start" if self._is_asking else "apply",
            "again": "restart" if self._has_answer else "continue",
        }

    @property
    def _has_answer(self) -> bool:
        """True if the shown search has an answer, so that the next search starts over."""
        return self._search is not None and self._search.state in ANSWERED_STATES

    def search_to_start(self) -> tuple[RunSpec, bool]:
        """Return the settings of the search to start, and True to start it over: an answered search has no next step.

        Raises UserError if the preset of the shown search is gone.
        """
        search, spec = self._search, self._next_run.spec
        if search is not None and search.question is not None and not has_same_settings(search, spec):
            # The next run has other settings by now: continue the search on the screen.
            spec = next_run_from_search(search.question).spec
        return spec, self._has_answer

    def action_apply(self) -> None:
        session, offer, search = self.session, self.view.offer, self._search
        if self._is_asking:
            self.start_search()
        elif offer is not None and search is not None and search.question is not None:
            next_run = self.next_run_of(search.question)
            if next_run is None:
                return
            is_other_model = next_run is not session.next_run
            if session.set_knobs(offer.knob_texts, next_run):
                if is_other_model:
                    words = f"The next run is now {search.question.name} with its search's answer; {RUN_KEY} runs it"
                    session.post(Notified(words))
                elif not has_same_settings(search, next_run.spec):
                    words = "Applied, but the search had other knobs: this may not fit with these."
                    session.post(Notified(words, "warning"))
            self.dismiss()
        elif not self.search_control.is_active:
            words = f"There is no answer to apply; {key_of('batch', 'again')} continues the search."
            self.notify(words, severity="warning")
        elif search is not None:
            # Without a search, the screen says already that the knobs are being checked.
            self.notify("There is no answer yet.", severity="warning")

"""The base of the screens of searches: start, pause, stop and leave a search, which outlives its screen."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Generic

from trainfast_runner.errors import UserError
from trainfast_runner.records.home import PAUSE_STATES
from trainfast_runner.records.run_directory import state_text
from trainfast_tui.control.messages import Notified
from trainfast_tui.control.search_control import SearchControl
from trainfast_tui.live.snapshot import SearchSnapshotT, Snapshot
from trainfast_tui.next_run.next_run import has_same_model
from trainfast_tui.next_run.sources import next_run_from_search
from trainfast_tui.painting import ListWidget
from trainfast_tui.panels.ask import ask_yes
from trainfast_tui.panels.header_footer import Footer
from trainfast_tui.screens.base import AppScreen
from trainfast_tui.text.format import LabelledText, Line, clamp_scroll, elapsed, hidden_words, labelled, rule
from trainfast_tui.text.keys import RUN_KEY, key_of

if TYPE_CHECKING:
    from trainfast_runner.search.journal import SearchQuestion
    from trainfast_runner.settings.spec import RunSpec
    from trainfast_tui.session import Session


class SearchScreen(AppScreen, Generic[SearchSnapshotT]):
    """Shows the followed search of one kind, or the question of the next one."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._search: SearchSnapshotT | None = None
        """The search on the screen; None while the screen asks whether to start one, and while one is starting."""
        self._is_asking = False
        """True while the screen asks whether to start a search; `_search` is None then.

        With neither a question nor a search on the screen, the search is starting.
        """
        self._now_ns = session.snapshot.taken_ns if session.snapshot is not None else 0
        """CLOCK_MONOTONIC of the newest snapshot."""

    @property
    def search_control(self) -> SearchControl[SearchSnapshotT]:
        """The session's control of this kind of search."""
        raise NotImplementedError

    @property
    def view(self) -> SearchView[SearchSnapshotT]:
        """The view of the search and of its question."""
        return self.query_one(SearchView)

    def show_newest(self) -> None:
        """Paint the followed search as of the newest snapshot, or the question of the next one."""
        if self.search_control.is_active:
            self._is_asking = False
        self.show_search(None if self._is_asking else self.search_control.current)

    def question(self) -> tuple[str, list[LabelledText]]:
        """Return the name of what the next search trains, and the rows that ask for it or say that it is starting."""
        raise NotImplementedError

    def search_to_start(self) -> tuple[RunSpec, bool]:
        """Return the settings of the search to start or continue, and True to start it over.

        Raises UserError if the preset of the shown search is gone.
        """
        raise NotImplementedError

    def hidden_actions(self) -> set[str]:
        """Return the ids of the actions that do nothing now, without those of this base class."""
        raise NotImplementedError

    def action_labels(self) -> Mapping[str, str]:
        """Return the labels that depend on the search by action id, without those of this base class."""
        raise NotImplementedError

    def reported(self) -> Sequence[str]:
        return () if self._search is None else (self._search.directory.name,)

    def show_snapshot(self, snapshot: Snapshot) -> None:
        """Paint the newest snapshot of the search."""
        self._now_ns = snapshot.taken_ns
        self.show_newest()

    def starting_row(self) -> LabelledText:
        """Return the text in place of the search while it is being started."""
        return "", f"The knobs are being checked… {elapsed(self.search_control.requested_ns, self._now_ns)}", "text"

    def show_search(self, search: SearchSnapshotT | None) -> None:
        """Put this search on the screen, or else the question; a notice about the state before is outdated."""
        if search is not None and (self._search is None or self._search.state != search.state):
            self.notify("")
        self._search = search
        if search is not None:
            self.view.show_search(search, self._now_ns)
        else:
            self.view.show_question(*self.question())
        self.show_useful_keys()

    def show_useful_keys(self) -> None:
        """Leave out of the footer the keys that do nothing now, and label the others by their effect."""
        search, is_active = self._search, self.search_control.is_active
        hidden = self.hidden_actions()
        if search is None or not search.is_live:
            hidden.add("pause")
        if not is_active:
            hidden.add("cancel")
        if self.answer_run_id() is None:
            hidden.add("export")
        if search is None or search.is_live:
            hidden.add("report")
        labels = {
            "pause": "resume" if search is not None and search.state in PAUSE_STATES else "pause",
            "leave": "leave" if is_active else "back",
        }
        self.query_one(Footer).set_actions(hidden, {**labels, **self.action_labels()})

    def show_refusal(self, error: UserError) -> None:
        """Show why the search cannot be started; without a search on the screen, ask again."""
        if self._search is None:
            self._is_asking = True
            self.show_newest()
        self.notify(f"Refused: {error.line_without_option()}", severity="error")
        self.show_useful_keys()

    def apply_knobs(self, question: SearchQuestion, knob_texts: Iterable[tuple[str, str]], answer_words: str) -> bool:
        """Give these values to the next run, which becomes one of the search's preset if it trains another; close.

        Return False, with a notice, if that preset is gone or a value is refused. `answer_words` name the values.
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
            words = f"The next run is now {question.name} with its search's {answer_words}; {RUN_KEY} runs it"
            session.post(Notified(words))
        elif not changed:
            session.post(Notified(f"The next run has the {answer_words} already; {RUN_KEY} runs it"))
        self.dismiss()
        return is_applied

    def start_search(self) -> None:
        """Start or continue the search; a live run is stopped first if the person agrees."""
        run, kind, running_kind = self.session.live_run, self.search_control.KIND, self.session.searches.running_kind
        if running_kind is not None and running_kind is not kind:
            self.notify("Another search is using the device.", severity="warning")
        elif self.search_control.is_active:
            self.notify("The search is starting.", severity="warning")
        elif self.session.run_control.pending.is_pending:
            words = f"A run is starting; press {key_of(kind, 'apply')} again once it is on the screen."
            self.notify(words, severity="warning")
        elif run is None:
            self._start_after(None)
        else:
            state = state_text(run.state)
            label = self.session.run_words(run.run_id)
            question = f"{label} is {state} and uses the device. Stop it and start the {kind.label} search?"
            ask_yes(self.app, question, "stop it, then search", partial(self._start_after, run.directory))

    def _start_after(self, run_to_stop: Path | None) -> None:
        """Start or continue the search once `run_to_stop` has ended."""
        try:
            spec, fresh = self.search_to_start()
        except UserError as error:
            self.show_refusal(error)
            return
        self.notify("")
        self.session.start_search(self.search_control.KIND, spec, run_to_stop, fresh=fresh)
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
            self.session.post(Notified(f"The search goes on; {self.search_control.KIND.key} shows it."))
        self.dismiss()


class SearchView(ListWidget, Generic[SearchSnapshotT]):
    """Shows a search with its table, else a question; the table scrolls, and a text longer than the screen."""

    TITLE: ClassVar[str]
    """The name of this kind of search, in front of its preset or script."""

    def __init__(self, spec_name: str = "") -> None:
        super().__init__()
        self._search: SearchSnapshotT | None = None
        """The search on the screen; None while a question is there."""
        self._now_ns = 0
        self._spec_name = spec_name
        """The preset or script of the question."""
        self._question: list[LabelledText] = []
        self._top = 0
        """The first visible line of a text that is longer than the screen."""
        self._rows_below = 0
        """Rows of the table that are hidden below."""
        self._visible_rows = 1
        """Lines of the text, or rows of the table, that a page has."""

    def show_search(self, search: SearchSnapshotT, now_ns: int) -> None:
        """Show this search as of `now_ns` (CLOCK_MONOTONIC)."""
        if self._search is None:
            self._top = self._rows_below = 0
        self._search, self._now_ns = search, now_ns
        self.repaint()

    def show_question(self, spec_name: str, rows: list[LabelledText]) -> None:
        """Show these rows about the next search, which trains `spec_name`."""
        if self._search is not None:
            self._top = 0
        self._search, self._spec_name, self._question = None, spec_name, rows
        self.repaint()

    def action_move(self, by: int) -> None:
        self.scroll_lines(by)

    @property
    def page_rows(self) -> int:
        return self._visible_rows

    def action_page(self, by: int) -> None:
        # A page is one of the table, also where the arrows move a cursor.
        self.scroll_lines(by * self.page_rows)

    def scroll_lines(self, by: int) -> None:
        """Scroll down by lines of a text that is longer than the screen, and by rows of the table."""
        self._top += by
        self._rows_below -= by
        self.repaint()

    def lines(self, width: int, height: int) -> list[Line]:
        if self._search is not None:
            return self.search_lines(self._search, width, height)
        question = [self.title_line(self._spec_name, width)]
        for label, text, tone in self._question:
            question += labelled((label, "accent"), text, width, tone)
        return self.scrolled_text(question, height)

    def search_lines(self, search: SearchSnapshotT, width: int, height: int) -> list[Line]:
        """Return the search in lines of `width` cells."""
        raise NotImplementedError

    def title_line(self, spec_name: str, width: int) -> Line:
        """Return the first line: the kind of search, and its preset or script."""
        return rule(f"{self.TITLE}: {spec_name}", width)

    def scrolled_text(self, text: list[Line], height: int) -> list[Line]:
        """Return the lines of the text that are visible in `height`.

        If not all fit, the last line counts the hidden ones and names the keys.
        """
        self._visible_rows, self._rows_below = max(1, height - 1), 0
        if len(text) <= height:
            self._top = 0
            return text
        room = max(0, height - 1)
        top = self._top = clamp_scroll(self._top, len(text), room)
        words = f"more lines: {hidden_words(top, len(text) - top - room)}  ↑ ↓"
        return [*text[top : top + room], [(words, "key")]]

    def scrolled_table(self, table: list[Line], room: int) -> tuple[list[Line], Line]:
        """Return the title with the rows that fit, the newest unless scrolled, and a line that counts the others."""
        title, *rows = table
        self._visible_rows = max(1, min(len(rows), room - 1))
        self._rows_below = clamp_scroll(self._rows_below, len(rows), self._visible_rows)
        end = len(rows) - self._rows_below
        first = max(0, end - self._visible_rows)
        words = hidden_words(first, self._rows_below)
        hidden_line: Line = [(f"more rows: {words}  PgUp PgDn", "key")] if words else []
        return [title, *rows[first:end]], hidden_line

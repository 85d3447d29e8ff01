"""All runs: filter, order, mark two, compare, open, delete."""

from __future__ import annotations

from functools import partial

from textual.app import ComposeResult

from trainfast_runner.errors import UserError
from trainfast_runner.records.file_locks import is_alive
from trainfast_runner.records.home import Home
from trainfast_runner.records.roles import WARM_ROLES
from trainfast_runner.records.run_states import state_text
from trainfast_runner.running.history import RunRow, row_of
from trainfast_runner.running.present_state import refuse_left_alone
from trainfast_tui.control.messages import Notified, ScreenMessage
from trainfast_tui.control.threads import as_warning, start_thread
from trainfast_tui.screens.base import AppScreen, PostedMessage
from trainfast_tui.session import Session
from trainfast_tui.text.keys import STOP_KEY, actions_of, key_of
from trainfast_tui.widgets.dialogs.ask import ask_text, ask_yes
from trainfast_tui.widgets.header_footer import Footer, StatusLine
from trainfast_tui.widgets.tables.run_detail import RunDetail
from trainfast_tui.widgets.tables.runs_table import RunsTable, row_matches

REFRESH_S = 2.0


class RunsListed(ScreenMessage, frozen=True):
    """The home's runs, newest first, with the warm processes of searches."""

    rows: list[RunRow]
    request_id: int


def list_runs(home: Home, earlier_rows: list[RunRow], request_id: int) -> RunsListed:
    """List the home's runs; those in `earlier_rows` that had ended are not read again."""
    ended = {row.run_id: row for row in earlier_rows if row.supervised is None and row.seconds is not None}
    return RunsListed([ended.get(run_id) or row_of(home, run_id) for run_id in reversed(home.run_ids())], request_id)


class RunsScreen(AppScreen):
    """Lists the runs in a thread: ten thousand take a while."""

    SCOPE = "runs"
    OPENS_COMPARISONS = True

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._home = session.home
        self._all_rows: list[RunRow] | None = None
        """All runs of the newest listing; None before the first."""
        self._rows: list[RunRow] = []
        """The runs without the warm processes of searches, which their search shows."""
        self._matching: list[RunRow] = []
        """The runs that the filter lets through."""
        self._filter = ""
        self._is_listing = False
        self._request_id = 0
        """Number of the newest listing."""

    def compose(self) -> ComposeResult:
        yield StatusLine(id="head")
        yield RunsTable()
        yield RunDetail()
        yield StatusLine(id="status")
        yield self.footer()

    def footer(self) -> Footer:
        """Return the footer; the order, which the head names as well, is the first key left out of a narrow one."""
        keys = sorted(actions_of("runs"), key=lambda action: action.id == "RunsTable.sort")
        return Footer([*keys, *actions_of("everywhere")])

    def on_mount(self) -> None:
        self.query_one("#head", StatusLine).show_text("runs", "title")
        self.action_reload()
        self.set_interval(REFRESH_S, self._look_again)

    def on_posted_message(self, message: PostedMessage) -> None:
        """Take in the newest listing: an earlier one may have runs that were deleted since."""
        listed = message.content
        if not isinstance(listed, RunsListed) or listed.request_id != self._request_id:
            return
        self._is_listing = False
        if listed.rows != self._all_rows:
            self._show_runs(listed.rows)

    def action_reload(self) -> None:
        self._list([])

    def _look_again(self) -> None:
        """List runs that have started, ended or gone meanwhile, unless an earlier look is still under way."""
        if not self._is_listing:
            self._list(self._all_rows or [])

    def _list(self, earlier_rows: list[RunRow]) -> None:
        self._is_listing = True
        self._request_id += 1
        start_thread(
            "runs", partial(list_runs, self._home, earlier_rows, self._request_id), self.post, self._not_listed
        )

    def _not_listed(self, error: UserError) -> Notified:
        self._is_listing = False
        return as_warning(error)

    def _show_runs(self, rows: list[RunRow]) -> None:
        self._all_rows = rows
        self._rows = [row for row in rows if row.role not in WARM_ROLES]
        self._matching = [row for row in self._rows if row_matches(row, self._filter)] if self._filter else self._rows
        listed_ids = {row.run_id for row in self._rows}
        self.table.marked = [run_id for run_id in self.table.marked if run_id in listed_ids]
        self.table.show_rows(self._matching, is_filtered=bool(self._filter))

    @property
    def table(self) -> RunsTable:
        return self.query_one(RunsTable)

    def on_sorted_table_moved(self) -> None:
        self.query_one(RunDetail).show_row(self.table.current)
        if self._all_rows is not None:
            order, count = self.table.order, f"{len(self._matching):,}"
            head = f"runs   {count} of {len(self._rows):,}" if self._filter else f"runs   {count}"
            head += f"   by {order.name}, {order.direction_labels[self.table.reverse]}"
            head += ", each seq_len apart" if self.table.is_grouped else ""
            head += f"   with “{self._filter}”" if self._filter else ""
            self.query_one("#head", StatusLine).show_text(head, "title")

    def action_filter(self) -> None:
        hint = "Words that must all occur: oom, tiny-llama, batch_size=64. Empty shows every run."
        ask_text(self.app, "Show runs with", hint, self._filter, self._apply_filter)

    def _apply_filter(self, words: str) -> None:
        self._filter = words.strip()
        if self._all_rows is not None:
            self._show_runs(self._all_rows)

    def action_compare(self) -> None:
        table = self.table
        if len(table.marked) == 2:
            a, b = sorted(table.marked)
        elif table.current is not None and table.below is not None:
            a, b = sorted((table.below.run_id, table.current.run_id))
        else:
            self.notify(f"Mark two runs with {key_of('runs', 'RunsTable.mark')}.")
            return
        self.session.compare(a, b)

    def action_open(self) -> None:
        row = self.table.current
        if row is not None:
            self.session.show_run(self._home.directory(row.run_id))
            self.dismiss()

    def action_delete(self) -> None:
        row = self.table.current
        if row is None:
            return
        if is_alive(self._home.directory(row.run_id)):
            keys = f"{key_of('runs', 'open')} opens it, {STOP_KEY} stops it"
            words = f"{row.run_id} is still running: {keys}; then it can be deleted."
            self.notify(words, severity="warning")
            return
        question = f"Delete {row.run_id} ({row.name}, {state_text(row.state)}) and all its records?"
        ask_yes(self.app, question, "delete it", partial(self._delete, row.run_id))

    def _delete(self, run_id: str) -> None:
        try:
            refuse_left_alone(self._home.directory(run_id), deletes=True)
            self._home.remove(run_id)
        except UserError as error:
            self.show_refusal(error)
            return
        except OSError as error:
            self.notify(f"not deleted: {error}", severity="error")
            return
        self.notify(f"deleted {run_id}")
        self._show_runs([row for row in self._all_rows or () if row.run_id != run_id])
        self._list(self._all_rows or [])

"""All runs: filter, order, mark two, compare, open, delete."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from functools import partial

from msgspec.structs import replace
from textual.app import ComposeResult

from trainfast_runner.errors import UserError
from trainfast_runner.records.home import STAMP_CHARACTERS, Home
from trainfast_runner.records.run_directory import is_alive, notable_reason, state_text
from trainfast_runner.records.worker_lines import WARM_ROLES
from trainfast_runner.running.history import RunRow, row_of
from trainfast_runner.running.present_state import refuse_left_alone
from trainfast_runner.running.settling import remove_run
from trainfast_runner.settings.spec import without_search_settings
from trainfast_tui.control.messages import Message, Notified
from trainfast_tui.control.threads import as_warning, start_thread
from trainfast_tui.painting import PaintedWidget
from trainfast_tui.panels.ask import ask_yes
from trainfast_tui.panels.header_footer import FilterLine
from trainfast_tui.panels.sorted_table import Column, SortedTable
from trainfast_tui.screens.base import AppScreen, PostedMessage
from trainfast_tui.session import Session
from trainfast_tui.text import format as fmt
from trainfast_tui.text.format import DOUBT_SIGN, SYNTHETIC_MARK, Line, Piece
from trainfast_tui.text.keys import RUN_KEY, STOP_KEY, key_of
from trainfast_tui.text.next_run_words import short_overrides, typed_overrides
from trainfast_tui.text.search_words import ROLE_WORDS

REFRESH_S = 2.0


class RunsListed(Message, frozen=True):
    """The home's runs, newest first, with the warm processes of searches."""

    rows: list[RunRow]


def list_runs(home: Home, earlier_rows: list[RunRow]) -> RunsListed:
    """List the home's runs; those in `earlier_rows` that had ended are not read again."""
    ended = {row.run_id: row for row in earlier_rows if row.supervised is None and row.seconds is not None}
    numbers = home.launch_numbers()
    ids = reversed(home.run_ids())
    return RunsListed([ended.get(id) or replace(row_of(home, id), number=numbers.get(id)) for id in ids])


def delete_run(home: Home, row: RunRow) -> Notified:
    """Delete a run with all its records. Raises UserError for one that is live."""
    refuse_left_alone(home.directory(row.run_id))
    remove_run(home, row.run_id)
    return Notified(f"deleted {_run_words(row)}")


def _run_words(row: RunRow) -> str:
    return row.run_id if row.number is None else f"run {row.number}"


class RunsScreen(AppScreen):
    """Lists the runs in a thread: ten thousand take a while."""

    SCOPE = "runs"
    OPENS_COMPARISONS = True

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._all_rows: list[RunRow] | None = None
        """All runs of the newest listing, with the warm processes of searches; None before the first."""
        self._is_listing = False
        self._deleted: set[str] = set()
        """Ids of deleted runs: a listing that was begun before does not bring them back."""

    def content(self) -> ComposeResult:
        yield RunsTable()
        yield RunDetail()

    def on_mount(self) -> None:
        self._list()
        self.set_interval(REFRESH_S, self._list)

    def on_posted_message(self, message: PostedMessage) -> None:
        """Take in a listing; leave other messages to the app."""
        if not isinstance(message.content, RunsListed):
            return
        self._is_listing = False
        rows = [row for row in message.content.rows if row.run_id not in self._deleted]
        if rows != self._all_rows:
            self._show_runs(rows)

    def _list(self) -> None:
        """List runs that have started, ended or gone meanwhile, unless an earlier look is still under way."""
        if not self._is_listing:
            self._is_listing = True
            start_thread(
                "runs", partial(list_runs, self.session.home, self._all_rows or []), self.post, self._not_listed
            )

    def _not_listed(self, error: UserError) -> Notified:
        self._is_listing = False
        return as_warning(error)

    def _show_runs(self, rows: list[RunRow]) -> None:
        self._all_rows = rows
        # The search of a warm process shows it.
        self.table.show_rows([row for row in rows if row.role not in WARM_ROLES])

    @property
    def table(self) -> RunsTable:
        return self.query_one(RunsTable)

    def on_sorted_table_moved(self) -> None:
        self.query_one(RunDetail).show_row(self.table.current)
        if self._all_rows is not None:
            self.query_one(FilterLine).show_count(f"{len(self.table.listed):,} of {len(self.table.all_rows):,}")

    def on_sorted_table_opened(self) -> None:
        self.action_open()

    def filter_rows(self, words: str) -> None:
        self.table.filter_rows(words)

    def answer_run_id(self) -> str | None:
        return self.table.current.run_id if self.table.current is not None else None

    def reported(self) -> Sequence[str]:
        return sorted(self.table.marked) or super().reported()

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
            self.session.show_run(self.session.home.directory(row.run_id))
            self.dismiss()

    def action_delete(self) -> None:
        row = self.table.current
        if row is None:
            return
        if is_alive(self.session.home.directory(row.run_id)):
            keys = f"{key_of('runs', 'open')} opens it, {STOP_KEY} stops it"
            words = f"{_run_words(row)} is still running: {keys}; then it can be deleted."
            self.notify(words, severity="warning")
            return
        question = f"Delete {_run_words(row)} ({row.name}, {state_text(row.state)}) and all its records?"
        ask_yes(self.app, question, "delete it", partial(self._delete, row))

    def _delete(self, row: RunRow) -> None:
        def not_deleted(error: UserError) -> Notified:
            self._deleted.discard(row.run_id)
            return as_warning(error)

        self._deleted.add(row.run_id)
        start_thread("delete", partial(delete_run, self.session.home, row), self.post, not_deleted)
        self._show_runs([other for other in self._all_rows or () if other.run_id != row.run_id])


class RunsTable(SortedTable[RunRow]):
    """Rows with a cursor and marks."""

    COLUMNS = (
        Column("run", 6, 6, lambda row: row.run_id),
        Column("started", 0, 16),
        Column("preset", 15, 22, lambda row: row.name, largest_first=False),
        Column("state", 17, 17, lambda row: row.state, largest_first=False),
        Column("samples/s", 12, 12, lambda row: None if row.measured_under else row.samples_per_s, align="right"),
        Column("peak memory", 0, 14, lambda row: row.peak_allocated_bytes, align="right"),
    )
    FIRST_ORDERS = ("run",)
    LAST_COLUMN, NOUN = "overrides", "runs"
    WIDE_FROM = 110

    marked: Sequence[str] = ()
    """Ids of marked runs, first marked first; at most two."""
    _no_rows_words = "listing the runs…"

    @property
    def below(self) -> RunRow | None:
        """The run one row below the cursor."""
        return self.listed[self._cursor + 1] if self._cursor + 1 < len(self.listed) else None

    def show_rows(self, rows: list[RunRow]) -> None:
        """Show these rows; a mark goes with its run."""
        self.all_rows, ids = rows, {row.run_id for row in rows}
        self.marked = [run_id for run_id in self.marked if run_id in ids]
        self._no_rows_words = f"No run yet; {key_of('runs', 'back')}, then {RUN_KEY} starts one."
        self.reorder()

    def text_of(self, row: RunRow) -> str:
        """Return id, preset, state, reason, each `knob=value` and each `model.FIELD=value`."""
        field_overrides = {key: value for key, value in row.overrides.items() if "." in key}
        words = [row.run_id, _run_words(row), row.name, row.state, state_text(row.state), row.reason]
        mark = SYNTHETIC_MARK * bool(row.synthetic_data)
        return " ".join([*words, *typed_overrides({**row.knobs, **field_overrides}), mark])

    def action_mark(self) -> None:
        """Mark or unmark the run under the cursor; a third mark replaces the oldest."""
        row = self.current
        if row is not None:
            others = [run_id for run_id in self.marked if run_id != row.run_id]
            self.marked = others if row.run_id in self.marked else [*others, row.run_id][-2:]
            self.repaint()

    @property
    def empty_words(self) -> str:
        return "No matching runs." if self.all_rows else self._no_rows_words

    def identity(self, row: RunRow) -> str:
        return row.run_id

    def mark(self, row: RunRow) -> str:
        return "●" if row.run_id in self.marked else " "

    def cells(self, row: RunRow) -> dict[str, Piece]:
        sign, tone = fmt.state_sign(row.state, row.doubts)
        state = "unsupervised" if row.supervised is False else state_text(row.state)
        speed, is_doubtful = fmt.number(row.samples_per_s), row.doubts and row.samples_per_s is not None
        return {
            "run": (fmt.ABSENT if row.number is None else str(row.number), "muted"),
            "started": (_started(row), "text"),
            "preset": (fmt.plain(row.name), "title"),
            "state": (f"{sign} {state}", tone),
            "samples/s": (f"{DOUBT_SIGN} {speed}", "warning") if is_doubtful else (speed, "text"),
            "peak memory": (fmt.size(row.peak_allocated_bytes), "text"),
        }

    def rest(self, row: RunRow, width: int) -> Line:
        changed = fmt.plain(short_overrides(without_search_settings(row.overrides, row.role), width))
        marks = [SYNTHETIC_MARK] * bool(row.synthetic_data) + [fmt.doubt_words(row.doubts)] * bool(row.doubts)
        notes: Line = [(ROLE_WORDS.get(row.role or "", ""), "muted"), (", ".join(marks), "warning")]
        notes.append((fmt.with_sizes(notable_reason(row.state, row.reason)), "muted"))
        return [(changed, "text"), *((f"  {text}", tone) for text, tone in notes if text)]


def _started(row: RunRow) -> str:
    if row.started_wall_ns is None:
        return row.run_id[:STAMP_CHARACTERS]
    return time.strftime("%m-%d %H:%M:%S", time.localtime(row.started_wall_ns / 1e9))


class RunDetail(PaintedWidget):
    """Three lines about one run; a script's run shows its whole command."""

    _row: RunRow | None = None

    def show_row(self, row: RunRow | None) -> None:
        """Show the run of this row of the table."""
        self._row = row
        self.repaint()

    def lines(self, width: int, height: int) -> list[Line]:
        row = self._row
        if row is None:
            return []
        reason = fmt.with_sizes(row.reason)
        settings = shlex.join(row.command or typed_overrides(row.overrides)) or "no overrides"
        words = ".  ".join(filter(None, (reason, fmt.plain(settings))))
        words += f"  {SYNTHETIC_MARK}" if row.synthetic_data else ""
        first: Line = [(row.run_id, "title"), (f"  {row.name}  ", "text"), (state_text(row.state), "muted")]
        return [first, *fmt.paragraph(words, width, "text")]

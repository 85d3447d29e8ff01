"""All runs: filter, order, mark two, compare, open, delete."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from functools import partial

from msgspec.structs import replace
from textual.app import ComposeResult

from trainfast_runner.errors import UserError
from trainfast_runner.records.home import Home
from trainfast_runner.records.run_directory import is_alive, notable_reason, state_text
from trainfast_runner.records.worker_lines import WARM_ROLES
from trainfast_runner.running.history import RunRow, row_of
from trainfast_runner.running.present_state import refuse_left_alone
from trainfast_runner.settings.knobs import KNOBS_BY_NAME, defaults
from trainfast_runner.settings.spec import without_search_settings
from trainfast_tui.control.messages import Message, Notified, Post
from trainfast_tui.control.threads import as_warning, start_thread
from trainfast_tui.painting import PaintedWidget
from trainfast_tui.panels.ask import ask_yes
from trainfast_tui.panels.header_footer import FilterLine
from trainfast_tui.panels.sorted_table import Columns, SortedTable, SortOrder
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
    request_id: int


def list_runs(home: Home, earlier_rows: list[RunRow], request_id: int) -> RunsListed:
    """List the home's runs; those in `earlier_rows` that had ended are not read again."""
    ended = {row.run_id: row for row in earlier_rows if row.supervised is None and row.seconds is not None}
    numbers = home.launch_numbers()
    return RunsListed(
        [
            ended.get(run_id) or replace(row_of(home, run_id), number=numbers.get(run_id))
            for run_id in reversed(home.run_ids())
        ],
        request_id,
    )


def delete_run(home: Home, row: RunRow, rows: list[RunRow], request_id: int, post: Post) -> RunsListed:
    """Delete a run with all its records, and list the others. Raises UserError for one that is live."""
    refuse_left_alone(home.directory(row.run_id))
    home.remove(row.run_id)
    post(Notified(f"deleted {_run_words(row)}"))
    return list_runs(home, rows, request_id)


def _run_words(row: RunRow) -> str:
    return row.run_id if row.number is None else f"run {row.number}"


class RunsScreen(AppScreen):
    """Lists the runs in a thread: ten thousand take a while."""

    SCOPE = "runs"
    OPENS_COMPARISONS = True

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._home = session.home
        self._all_rows: list[RunRow] | None = None
        """All runs of the newest listing, with the warm processes of searches; None before the first."""
        self._is_listing = False
        self._request_id = 0
        """Number of the newest listing."""

    def content(self) -> ComposeResult:
        yield RunsHead()
        yield RunsTable()
        yield RunDetail()

    def on_mount(self) -> None:
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
        # The search of a warm process shows it.
        self.table.show_rows([row for row in rows if row.role not in WARM_ROLES])

    @property
    def table(self) -> RunsTable:
        return self.query_one(RunsTable)

    def on_sorted_table_moved(self) -> None:
        self.query_one(RunDetail).show_row(self.table.current)
        if self._all_rows is not None:
            self.query_one(RunsHead).show_text(self._head())
            self.query_one(FilterLine).show_count(f"{len(self.table.listed):,} of {len(self.table.all_rows):,}")

    def _head(self) -> str:
        order = self.table.order
        return f"runs   {len(self.table.listed):,}   by {order.name}, {order.direction_labels[self.table.reverse]}"

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
            self.session.show_run(self._home.directory(row.run_id))
            self.dismiss()

    def action_delete(self) -> None:
        row = self.table.current
        if row is None:
            return
        if is_alive(self._home.directory(row.run_id)):
            keys = f"{key_of('runs', 'open')} opens it, {STOP_KEY} stops it"
            words = f"{_run_words(row)} is still running: {keys}; then it can be deleted."
            self.notify(words, severity="warning")
            return
        question = f"Delete {_run_words(row)} ({row.name}, {state_text(row.state)}) and all its records?"
        ask_yes(self.app, question, "delete it", partial(self._delete, row))

    def _delete(self, row: RunRow) -> None:
        """Delete a run and list the others; a listing that was begun before does not bring it back."""
        self._is_listing = True
        self._request_id += 1
        rows = [other for other in self._all_rows or () if other.run_id != row.run_id]
        delete = partial(delete_run, self._home, row, rows, self._request_id, self.post)
        start_thread("delete", delete, self.post, self._not_listed)
        self._show_runs(rows)


class RunsHead(PaintedWidget):
    """The number of runs and their order."""

    _text = "runs"

    def show_text(self, text: str) -> None:
        """Show this line."""
        self._text = text
        self.repaint()

    def lines(self, width: int, height: int) -> list[Line]:
        return [[(self._text, "title")]]


ALL_COLUMNS: Columns = (
    ("run", 6),
    ("started", 16),
    ("preset", 22),
    ("state", 17),
    ("samples/s", 12),
    ("peak memory", 14),
)
FEWER_COLUMNS: Columns = (("run", 6), ("preset", 15), ("state", 17), ("samples/s", 12))
ALL_COLUMNS_FROM = 110
"""The width from which the table has all columns."""
ID_TIME_LETTERS = len("20261121-054455")
"""The letters of a run's id that are its start."""

ORDERS: tuple[SortOrder[RunRow], ...] = (
    SortOrder("run", lambda row: row.run_id, direction_labels=("newest first", "oldest first")),
    SortOrder("samples/s", lambda row: row.samples_per_s if row.measured_under is None else None),
    SortOrder("peak memory", lambda row: row.peak_allocated_bytes),
    SortOrder("preset", lambda row: row.name, largest_first=False, direction_labels=("a to z", "z to a")),
    SortOrder("state", lambda row: row.state, largest_first=False, direction_labels=("a to z", "z to a")),
)


class RunsTable(SortedTable[RunRow]):
    """Rows with a cursor and marks."""

    ORDERS = ORDERS
    RIGHT_ALIGNED = ("samples/s", "peak memory")
    LAST_COLUMN = "overrides"
    MARGIN = 3

    def __init__(self) -> None:
        super().__init__()
        self.marked: list[str] = []
        """Ids of marked runs, first marked first; at most two."""
        self._empty_words = "listing the runs…"

    @property
    def below(self) -> RunRow | None:
        """The run one row below the cursor."""
        return self.listed[self._cursor + 1] if self._cursor + 1 < len(self.listed) else None

    def show_rows(self, rows: list[RunRow]) -> None:
        """Show these rows; a mark goes with its run."""
        self.all_rows, ids = rows, {row.run_id for row in rows}
        self.marked = [run_id for run_id in self.marked if run_id in ids]
        self._empty_words = f"No run yet; {key_of('runs', 'back')}, then {RUN_KEY} starts one."
        self.reorder()

    def text_of(self, row: RunRow) -> str:
        """Return id, preset, state, reason, each `knob=value` and each `model.FIELD=value`."""
        field_overrides = {key: value for key, value in row.overrides.items() if "." in key}
        return " ".join(
            [row.run_id, _run_words(row), row.name, row.state, state_text(row.state), row.reason]
            + typed_overrides(row.knobs)
            + typed_overrides(field_overrides)
            + ([SYNTHETIC_MARK] if row.synthetic_data else [])
        )

    def action_mark(self) -> None:
        """Mark or unmark the run under the cursor; a third mark replaces the oldest."""
        row = self.current
        if row is None:
            return
        if row.run_id in self.marked:
            self.marked.remove(row.run_id)
        else:
            self.marked = [*self.marked, row.run_id][-2:]
        self.repaint()

    def lines(self, width: int, height: int) -> list[Line]:
        if not self.listed:
            return [[("No matching runs." if self.all_rows else self._empty_words, "muted")]]
        return [self.heading(width), *self.visible_rows(width, height - 1)]

    def identity(self, row: RunRow) -> str:
        return row.run_id

    def columns(self, width: int) -> Columns:
        return ALL_COLUMNS if width >= ALL_COLUMNS_FROM else FEWER_COLUMNS

    def row_line(self, row: RunRow, width: int) -> Line:
        sign, tone = fmt.state_sign(row.state, row.doubts)
        state = "unsupervised" if row.supervised is False else state_text(row.state)
        cells: dict[str, Piece] = {
            "run": (fmt.ABSENT if row.number is None else str(row.number), "muted"),
            "started": (_started(row), "text"),
            "preset": (fmt.plain(row.name), "title"),
            "state": (f"{sign} {state}", tone),
            "samples/s": _speed(row),
            "peak memory": (fmt.size(row.peak_allocated_bytes), "text"),
        }
        line: Line = [(f" {'●' if row.run_id in self.marked else ' '} ", "accent")]
        line += [
            (self.cell(name, cells[name][0], column_width), cells[name][1])
            for name, column_width in self.columns(width)
        ]
        overrides = without_search_settings(row.overrides, row.role)
        changed = fmt.plain(short_overrides(overrides, width - fmt.line_length(line)))
        line.append((changed, "text"))
        gap = "  " if changed else ""
        if role := ROLE_WORDS.get(row.role or ""):
            line.append((f"{gap}{role}", "muted"))
            gap = "  "
        marks = [SYNTHETIC_MARK] * bool(row.synthetic_data) + [fmt.doubt_words(row.doubts)] * bool(row.doubts)
        line.append((f"{gap}{', '.join(marks)}" if marks else "", "warning"))
        reason = fmt.with_sizes(notable_reason(row.state, row.reason))
        return [*line, (f"  {reason}" if reason else "", "muted")]


def _speed(row: RunRow) -> Piece:
    """Return the samples per second, with a sign if the figure is in doubt."""
    if row.doubts and row.samples_per_s is not None:
        return f"{DOUBT_SIGN} {fmt.number(row.samples_per_s)}", "warning"
    return fmt.number(row.samples_per_s), "text"


def _started(row: RunRow) -> str:
    if row.started_wall_ns is None:
        return row.run_id[:ID_TIME_LETTERS]
    return time.strftime("%m-%d %H:%M:%S", time.localtime(row.started_wall_ns / 1e9))


LEFT_OUT_KNOBS = ("steps", "timing_warmup", "devices", "watch", "seed")
"""Knobs left out of the overrides: they change little of a result."""
KNOB_DEFAULTS = defaults()


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
        first: Line = [(row.run_id, "title"), (f"  {row.name}  ", "text"), (state_text(row.state), "muted")]
        reason = fmt.with_sizes(row.reason)
        if row.command:
            return [
                first,
                *fmt.paragraph(shlex.join(row.command), width, "text"),
                *fmt.paragraph(reason, width, "muted"),
            ]
        knobs = " ".join(override_words(row)) or "all knobs at their defaults"
        knobs += f"  {SYNTHETIC_MARK}" if row.synthetic_data else ""
        return [first, *fmt.paragraph(f"{reason}.  {knobs}" if reason else knobs, width, "text")]


def override_words(row: RunRow) -> list[str]:
    """Return the overrides, then the preset's own knobs that are not at their default, as they are typed."""
    return [fmt.plain(setting) for setting in typed_overrides(row.overrides)] + [
        f"{name}={KNOBS_BY_NAME[name].text_of(value)}"
        for name, value in row.knobs.items()
        if name in KNOBS_BY_NAME
        and name not in LEFT_OUT_KNOBS
        and name not in row.overrides
        and value != KNOB_DEFAULTS[name]
    ]

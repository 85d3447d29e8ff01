"""The table of runs, with marks."""

from __future__ import annotations

import time

from trainfast_runner.records.run_states import notable_reason, state_text
from trainfast_runner.running.history import RunRow
from trainfast_runner.settings.set_by_searches import without_search_settings
from trainfast_tui.text import format as fmt
from trainfast_tui.text.keys import RUN_KEY, key_of
from trainfast_tui.text.lines import Line, Piece, has_all_words, line_length
from trainfast_tui.text.overrides import short_overrides, typed_overrides
from trainfast_tui.text.search.warm_process import ROLE_WORDS
from trainfast_tui.text.signs import DOUBT_SIGN, SYNTHETIC_MARK, doubt_words, run_sign
from trainfast_tui.widgets.tables.sorted_table import Columns, SortedTable, SortOrder

ALL_COLUMNS: Columns = (("started", 18), ("preset", 26), ("state", 17), ("samples/s", 12), ("peak memory", 14))
FEWER_COLUMNS: Columns = (("started", 16), ("preset", 15), ("state", 17), ("samples/s", 12))
FEWEST_COLUMNS: Columns = (("preset", 15), ("state", 17), ("samples/s", 12))
ALL_COLUMNS_FROM, START_TIMES_FROM = 110, 80
"""Widths from which the table has all columns, and from which it has the column `started`."""
SEQ_LEN = "seq_len"
ID_TIME_LETTERS = len("20261121-054455")
"""The letters of a run's id that are its start."""

ORDERS: tuple[SortOrder[RunRow], ...] = (
    SortOrder("started", lambda row: row.run_id, direction_labels=("newest first", "oldest first")),
    # Samples of different lengths are different work, so samples/s rank within one seq_len.
    SortOrder(
        "samples/s",
        lambda row: row.samples_per_s if row.measured_under is None else None,
        group_by=lambda row: _seq_len_text(row),
    ),
    SortOrder("peak memory", lambda row: row.peak_allocated_bytes),
    SortOrder("preset", lambda row: row.name, largest_first=False, direction_labels=("a to z", "z to a")),
    SortOrder("state", lambda row: row.state, largest_first=False, direction_labels=("a to z", "z to a")),
)


def row_matches(row: RunRow, words: str) -> bool:
    """True if every word stands in the row: its id, preset, state, reason, a `knob=value` or a `model.FIELD=value`."""
    field_overrides = {key: value for key, value in row.overrides.items() if "." in key}
    text = " ".join(
        [row.run_id, row.name, row.state, state_text(row.state), row.reason]
        + typed_overrides(row.knobs)
        + typed_overrides(field_overrides)
        + ([SYNTHETIC_MARK] if row.synthetic_data else [])
    )
    return has_all_words(text, words)


class RunsTable(SortedTable[RunRow]):
    """Rows with a cursor and marks."""

    DEFAULT_CSS = "RunsTable { height: 1fr; }"
    ORDERS = ORDERS
    RIGHT_ALIGNED = ("samples/s", "peak memory")
    LAST_COLUMN = "overrides"
    MARGIN = 3

    def __init__(self) -> None:
        super().__init__()
        self.marked: list[str] = []
        """Ids of marked runs, first marked first; at most two."""
        self._empty_words = "listing the runs…"
        self.is_grouped = False
        """True if the order is by a figure that ranks among the runs of one seq_len alone, and there are several."""

    @property
    def below(self) -> RunRow | None:
        """The run one row below the cursor."""
        return self._ordered_rows[self._cursor + 1] if self._cursor + 1 < len(self._ordered_rows) else None

    @property
    def orders(self) -> list[SortOrder[RunRow]]:
        """The order by start, and those by visible columns."""
        return list(dict.fromkeys((ORDERS[0], *super().orders)))

    def show_rows(self, rows: list[RunRow], *, is_filtered: bool) -> None:
        """Show these rows; if there are none, `is_filtered` tells a filter from a home without runs."""
        self._listed_rows = rows
        first_steps = f"No run yet; {key_of('runs', 'back')}, then {RUN_KEY} starts one."
        self._empty_words = "No matching runs." if is_filtered else first_steps
        self.reorder()

    def reorder(self) -> None:
        """Put the listed rows in order and draw them; the cursor stays on its run."""
        if (row := self.current) is not None:
            self._current_identity = row.run_id
        order = self.order
        ranked = [row for row in self._listed_rows if order.group_by is not None and order.key(row) is not None]
        self.is_grouped = len(set(map(_seq_len_text, ranked))) > 1
        super().reorder()

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
        if not self._ordered_rows:
            return [[(self._empty_words, "muted")]]
        return [self.heading(width), *self.visible_rows(width, height - 1)]

    def identity(self, row: RunRow) -> str:
        return row.run_id

    def columns(self, width: int) -> Columns:
        return (
            ALL_COLUMNS if width >= ALL_COLUMNS_FROM else FEWER_COLUMNS if width >= START_TIMES_FROM else FEWEST_COLUMNS
        )

    def row_line(self, row: RunRow, width: int) -> Line:
        sign, tone = run_sign(row.state, row.doubts)
        state = "unsupervised" if row.supervised is False else state_text(row.state)
        cells: dict[str, Piece] = {
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
        if self.is_grouped and self.order.key(row) is not None and (length := _seq_len_text(row)):
            overrides.pop(SEQ_LEN, None)
            line.append((f"{length}  ", "title"))
        changed = fmt.plain(short_overrides(overrides, width - line_length(line)))
        line.append((changed, "text"))
        gap = "  " if changed else ""
        if role := ROLE_WORDS.get(row.role or ""):
            line.append((f"{gap}{role}", "muted"))
            gap = "  "
        marks = [SYNTHETIC_MARK] * bool(row.synthetic_data) + [doubt_words(row.doubts)] * bool(row.doubts)
        line.append((f"{gap}{', '.join(marks)}" if marks else "", "warning"))
        reason = fmt.with_sizes(notable_reason(row.state, row.reason))
        return [*line, (f"  {reason}" if reason else "", "muted")]


def _speed(row: RunRow) -> Piece:
    """Return the samples per second, with a sign if the figure is in doubt."""
    if row.doubts and row.samples_per_s is not None:
        return f"{DOUBT_SIGN} {fmt.number(row.samples_per_s)}", "warning"
    return fmt.number(row.samples_per_s), "text"


def _seq_len_text(row: RunRow) -> str:
    """Return the seq_len as it is typed; empty for a script without a mapped seq_len."""
    length = row.knobs.get(SEQ_LEN)
    return "" if length is None else fmt.plain(f"{SEQ_LEN}={length}")


def _started(row: RunRow) -> str:
    if row.started_wall_ns is None:
        return row.run_id[:ID_TIME_LETTERS]
    return time.strftime("%m-%d %H:%M:%S", time.localtime(row.started_wall_ns / 1e9))

"""All runs: filter, order, mark two, compare, open, delete."""

from __future__ import annotations

from functools import partial

from textual.app import ComposeResult
from textual.message import Message
from textual.screen import Screen

from trainfast_runner.errors import UserError
from trainfast_runner.records.home import Home, is_alive
from trainfast_runner.records.run_file import PROBE
from trainfast_runner.records.state_words import state_words
from trainfast_runner.running.history import RunRow, iter_rows, row_of
from trainfast_tui.control.background import in_background
from trainfast_tui.control.messages import Said, said_no
from trainfast_tui.screens.shared import OfTheApp
from trainfast_tui.text.keys import bindings, of
from trainfast_tui.widgets.run_detail import RunDetail
from trainfast_tui.widgets.runs_table import ORDERS, RunsTable, fits, orders_of
from trainfast_tui.widgets.sorted_table import ordered
from trainfast_tui.widgets.strips import Footer, StatusLine

REFRESH_S = 2.0


def listed_again(home: Home, known: list[RunRow]) -> list[RunRow]:
    """The home's runs, newest first, reading only those that are new or had not ended when `known` was read."""
    settled = {row.run_id: row for row in known if row.supervised is None and row.seconds is not None}
    ids = reversed(home.run_ids())
    return [settled.get(run_id) or row_of(home, run_id) for run_id in ids]


class RunsListed(Message):
    """The home's runs, newest first. Probes of searches are among them, to be known when it is looked at again."""

    def __init__(self, rows: list[RunRow]) -> None:
        super().__init__()
        self.rows = rows


class RunsScreen(OfTheApp, Screen[None]):
    """Lists in a thread of its own: ten thousand runs take a while."""

    SCOPE = "runs"
    BINDINGS = [*bindings("runs")]
    DEFAULT_CSS = "RunsScreen { layout: vertical; overflow: hidden; }"

    def __init__(self, home: Home, *, ascii: bool) -> None:
        super().__init__()
        self._home = home
        self._ascii = ascii
        self._known: list[RunRow] = []
        self._rows: list[RunRow] = []
        """Those that are listed: a search shows its probes itself."""
        self._filter = ""
        self._order = ORDERS[0].name
        self._reverse = False
        self._is_listing = False
        self._is_listed = False

    def compose(self) -> ComposeResult:
        yield StatusLine(ascii=self._ascii, id="head")
        yield RunsTable(ascii=self._ascii)
        yield RunDetail(ascii=self._ascii)
        yield StatusLine(ascii=self._ascii, id="status")
        # Where the keys do not fit the last go first: the order is said above, deleting is nowhere else.
        keys = sorted(of("runs"), key=lambda command: command.id == "sort")
        yield Footer([*keys, *of("everywhere")], ascii=self._ascii)

    def on_mount(self) -> None:
        self.query_one("#head", StatusLine).say("runs", "title")
        self.action_reload()
        self.set_interval(REFRESH_S, self._look_again)

    def on_resize(self) -> None:
        self._show()

    def on_runs_listed(self, message: RunsListed) -> None:
        self._is_listing, self._is_listed = False, True
        if message.rows != self._known or not self._known:
            self._known = message.rows
            self._rows = [row for row in message.rows if row.role != PROBE]
            self._show()

    def _look_again(self) -> None:
        """What has started, ended or gone meanwhile; nothing while an earlier look is still under way."""
        if self._is_listing or not self._is_listed:
            return
        self._is_listing = True
        known = self._known
        in_background("runs", lambda: RunsListed(listed_again(self._home, known)), self.post_message, self._could_not)

    def _could_not(self, problem: UserError) -> Said:
        self._is_listing = False
        return said_no(problem)

    def _show(self) -> None:
        if not self._is_listed:
            return
        rows = [row for row in self._rows if fits(row, self._filter)] if self._filter else self._rows
        orders = orders_of(self.size.width)
        order = next((one for one in orders if one.name == self._order), orders[0])
        self.table.show(ordered(rows, order, self._reverse), order, self._reverse)
        self.query_one(RunDetail).show(self.table.current)
        said = f"runs   {len(rows):,} of {len(self._rows):,}" if self._filter else f"runs   {len(rows):,}"
        said += f"   by {order.name}, {order.words[self._reverse]}"
        self.query_one("#head", StatusLine).say(said + (f"   with “{self._filter}”" if self._filter else ""), "title")

    @property
    def table(self) -> RunsTable:
        return self.query_one(RunsTable)

    def say(self, text: str, tone: str = "text") -> None:
        """A line at the bottom."""
        self.query_one("#status", StatusLine).say(text, tone)

    def action_reload(self) -> None:
        in_background("runs", lambda: RunsListed(list(iter_rows(self._home, probes=True))), self.post_message, said_no)

    def action_move(self, by: int) -> None:
        self.table.move(by)
        self.query_one(RunDetail).show(self.table.current)

    def action_page(self, by: int) -> None:
        self.action_move(by * self.table.page_rows)

    def action_end(self, by: int) -> None:
        self.action_move(by * len(self._rows))

    def action_mark(self) -> None:
        self.table.mark()

    def action_sort(self) -> None:
        names = [order.name for order in orders_of(self.size.width)]
        here = names.index(self._order) if self._order in names else 0
        self._order = names[(here + 1) % len(names)]
        self._show()

    def action_reverse(self) -> None:
        self._reverse = not self._reverse
        self._show()

    def action_filter(self) -> None:
        from trainfast_tui.screens.dialogs import Ask

        hint = "Words that must all occur: oom, tiny-llama, batch_size=64. Empty shows every run."
        self.app.push_screen(Ask("Show runs with", hint, self._filter, None, ascii=self._ascii), self._filtered)

    def _filtered(self, words: object) -> None:
        if isinstance(words, str):
            self._filter = words.strip()
            self._show()

    def action_compare(self) -> None:
        table = self.table
        if len(table.marked) == 2:
            a, b = sorted(table.marked)
        elif table.current is not None and table.below is not None:
            a, b = sorted((table.below.run_id, table.current.run_id))
        else:
            self.say("Mark two runs with space.")
            return
        from trainfast_tui.screens.compare import comparison_of

        in_background("compare", partial(comparison_of, self._home, a, b), self.app.post_message, said_no)

    def action_open(self) -> None:
        row = self.table.current
        if row is not None:
            self.trainfast.show_run(self._home.directory(row.run_id))
            self.dismiss()

    def action_delete(self) -> None:
        row = self.table.current
        if row is None:
            return
        if is_alive(self._home.directory(row.run_id)):
            self.say(f"{row.run_id} is still running: Enter opens it, s stops it; then it can be deleted.", "warning")
            return
        from trainfast_tui.screens.dialogs import Confirm

        question = f"Delete {row.run_id} ({row.name}, {state_words(row.state)}) and all its records?"
        self.app.push_screen(Confirm(question, "delete it", ascii=self._ascii), partial(self._delete, row.run_id))

    def _delete(self, run_id: str, yes: object) -> None:
        if not yes:
            return
        try:
            self._home.remove(run_id)
        except UserError as problem:
            self.say(problem.line(), "error")
            return
        except OSError as error:
            self.say(f"not deleted: {error}", "error")
            return
        self._rows = [row for row in self._rows if row.run_id != run_id]
        self._known = [row for row in self._known if row.run_id != run_id]
        self.table.marked = [marked for marked in self.table.marked if marked != run_id]
        self.say(f"deleted {run_id}")
        self._show()

    def action_back(self) -> None:
        self.dismiss()

"""All runs: filter, order, mark two, compare, open, delete."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from textual.app import ComposeResult
from textual.message import Message
from textual.screen import Screen

from trainfast_runner.home import Home
from trainfast_runner.problem import Problem
from trainfast_runner.runs import RunRow, list_rows
from trainfast_tui.background import in_background
from trainfast_tui.commands import bindings, of
from trainfast_tui.messages import said_no
from trainfast_tui.widgets.runs_table import ORDERS, RunsTable, fits, ordered
from trainfast_tui.widgets.small_parts import Footer, StatusLine

if TYPE_CHECKING:
    from trainfast_tui.app import TrainfastApp


class RunsListed(Message):
    """The home's runs, newest first."""

    def __init__(self, rows: list[RunRow]) -> None:
        super().__init__()
        self.rows = rows


class RunsScreen(Screen[None]):
    """Lists in a thread of its own: ten thousand runs take a while."""

    SCOPE = "runs"
    BINDINGS = [*bindings("runs")]
    DEFAULT_CSS = "RunsScreen { layout: vertical; overflow: hidden; }"

    def __init__(self, home: Home, *, ascii: bool) -> None:
        super().__init__()
        self._home = home
        self._ascii = ascii
        self._rows: list[RunRow] = []
        self._filter = ""
        self._order = 0
        self._reverse = False

    def compose(self) -> ComposeResult:
        yield StatusLine(ascii=self._ascii, id="head")
        yield RunsTable(ascii=self._ascii)
        yield StatusLine(ascii=self._ascii, id="status")
        yield Footer([*of("runs"), *of("everywhere")], ascii=self._ascii)

    def on_mount(self) -> None:
        self.query_one("#head", StatusLine).say("runs", "title")
        self.action_reload()

    def on_runs_listed(self, message: RunsListed) -> None:
        self._rows = message.rows
        self._show()

    def _show(self) -> None:
        rows = [row for row in self._rows if fits(row, self._filter)] if self._filter else self._rows
        order = ORDERS[self._order]
        self.table.show(ordered(rows, order, self._reverse), order, self._reverse)
        said = f"runs   {len(rows):,} of {len(self._rows):,}" if self._filter else f"runs   {len(rows):,}"
        self.query_one("#head", StatusLine).say(said + (f"   with “{self._filter}”" if self._filter else ""), "title")

    @property
    def table(self) -> RunsTable:
        return self.query_one(RunsTable)

    @property
    def trainfast(self) -> TrainfastApp:
        app: Any = self.app
        return app  # type: ignore[no-any-return]

    def say(self, text: str, tone: str = "text") -> None:
        """A line at the bottom."""
        self.query_one("#status", StatusLine).say(text, tone)

    def action_reload(self) -> None:
        in_background("runs", lambda: RunsListed(list_rows(self._home)), self.post_message, said_no)

    def action_move(self, by: int) -> None:
        self.table.move(by)

    def action_page(self, by: int) -> None:
        self.table.page(by)

    def action_end(self, by: int) -> None:
        self.table.move(by * len(self._rows))

    def action_mark(self) -> None:
        self.table.mark()

    def action_sort(self) -> None:
        self._order = (self._order + 1) % len(ORDERS)
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
        from trainfast_tui.screens.dialogs import Confirm

        question = f"Delete {row.run_id} ({row.name}, {row.state}) and all its records?"
        self.app.push_screen(Confirm(question, "delete it", ascii=self._ascii), partial(self._delete, row.run_id))

    def _delete(self, run_id: str, yes: object) -> None:
        if not yes:
            return
        try:
            self._home.remove(run_id)
        except Problem as problem:
            self.say(problem.line(), "error")
            return
        except OSError as error:
            self.say(f"not deleted: {error}", "error")
            return
        self._rows = [row for row in self._rows if row.run_id != run_id]
        self.table.marked = [marked for marked in self.table.marked if marked != run_id]
        self.say(f"deleted {run_id}")
        self._show()

    def action_back(self) -> None:
        self.dismiss()

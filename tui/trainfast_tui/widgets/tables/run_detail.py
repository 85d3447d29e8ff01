"""The details of the run under the cursor: the whole id, the reason of its end, every override."""

from __future__ import annotations

import shlex

from trainfast_runner.records.run_states import state_words
from trainfast_runner.running.history import RunRow
from trainfast_tui.painting.painted import Painted
from trainfast_tui.text.format import with_sizes
from trainfast_tui.text.lines import Line, paragraph
from trainfast_tui.text.signs import SYNTHETIC
from trainfast_tui.widgets.tables.runs_table import override_words


class RunDetail(Painted):
    """Three lines about one run; a script's run shows its whole command."""

    DEFAULT_CSS = "RunDetail { height: 3; }"
    _row: RunRow | None = None

    def show_row(self, row: RunRow | None) -> None:
        """Show the run of this row of the table."""
        self._row = row
        self.repaint()

    def lines(self, width: int, height: int) -> list[Line]:
        row = self._row
        if row is None:
            return []
        first: Line = [(row.run_id, "title"), (f"  {row.name}  ", "text"), (state_words(row.state), "muted")]
        reason = with_sizes(row.reason)
        if row.command:
            return [first, *paragraph(shlex.join(row.command), width, "text"), *paragraph(reason, width, "muted")]
        knobs = " ".join(override_words(row)) or "all knobs at their defaults"
        knobs += f"  {SYNTHETIC}" if row.synthetic_data else ""
        return [first, *paragraph(f"{reason}.  {knobs}" if reason else knobs, width, "text")]

"""The details of the run under the cursor: the whole id, the reason of its end, every override."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainfast_runner.records.state_words import state_words
from trainfast_tui.charts.painted import Painted
from trainfast_tui.text.lines import Line, wrap
from trainfast_tui.widgets.runs_table import SYNTHETIC, turned_of

if TYPE_CHECKING:
    from trainfast_runner.running.history import RunRow


class RunDetail(Painted):
    """Three lines about one run."""

    DEFAULT_CSS = "RunDetail { height: 3; }"

    def __init__(self) -> None:
        super().__init__()
        self._about: RunRow | None = None

    def show(self, row: RunRow | None) -> None:
        """Show this run; None for none."""
        self._about = row
        self.repaint()

    def lines(self, width: int, height: int) -> list[Line]:
        row = self._about
        if row is None:
            return []
        knobs = " ".join(turned_of(row)) or "knobs as the defaults"
        knobs += f"  {SYNTHETIC}" if row.synthetic_data else ""
        rest = f"{row.reason}.  {knobs}" if row.reason else knobs
        first: Line = [(row.run_id, "title"), (f"  {row.name}  ", "text"), (state_words(row.state), "muted")]
        return [first, *([(line, "text")] for line in wrap(rest, width))]

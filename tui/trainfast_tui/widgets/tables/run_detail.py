"""The details of the run under the cursor: the whole id, the reason of its end, every override."""

from __future__ import annotations

import shlex

from trainfast_runner.records.run_states import state_text
from trainfast_runner.running.history import RunRow
from trainfast_runner.settings.knobs import KNOBS_BY_NAME, defaults
from trainfast_tui.painting.painted import PaintedWidget
from trainfast_tui.text.format import plain, with_sizes
from trainfast_tui.text.lines import Line, paragraph
from trainfast_tui.text.overrides import typed_overrides
from trainfast_tui.text.signs import SYNTHETIC_MARK

LEFT_OUT_KNOBS = ("steps", "timing_warmup", "devices", "watch", "seed")
"""Knobs left out of the overrides: they change little of a result."""
KNOB_DEFAULTS = defaults()


class RunDetail(PaintedWidget):
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
        first: Line = [(row.run_id, "title"), (f"  {row.name}  ", "text"), (state_text(row.state), "muted")]
        reason = with_sizes(row.reason)
        if row.command:
            return [first, *paragraph(shlex.join(row.command), width, "text"), *paragraph(reason, width, "muted")]
        knobs = " ".join(override_words(row)) or "all knobs at their defaults"
        knobs += f"  {SYNTHETIC_MARK}" if row.synthetic_data else ""
        return [first, *paragraph(f"{reason}.  {knobs}" if reason else knobs, width, "text")]


def override_words(row: RunRow) -> list[str]:
    """Return the overrides, then the preset's own knobs that are not at their default, as they are typed."""
    return [plain(setting) for setting in typed_overrides(row.overrides)] + [
        f"{name}={KNOBS_BY_NAME[name].text_of(value)}"
        for name, value in row.knobs.items()
        if name in KNOBS_BY_NAME
        and name not in LEFT_OUT_KNOBS
        and name not in row.overrides
        and value != KNOB_DEFAULTS[name]
    ]

"""A painted widget about the run on the screen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainfast_tui.painting.painted import Painted

if TYPE_CHECKING:
    from trainfast_runner.running.follower import RunSnapshot


class PaintedRun(Painted):
    """A widget about a run, by the newest snapshot of it."""

    _run: RunSnapshot | None = None

    def show_run(self, run: RunSnapshot | None) -> None:
        """Draw this run from now on."""
        self._run = run
        self.repaint()

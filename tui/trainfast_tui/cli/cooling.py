"""The wait of `--cool-to`, reported on stderr."""

from __future__ import annotations

from trainfast_runner.machine.cooling import Cooling, wait_until_cool
from trainfast_runner.running.planning import RunPlan
from trainfast_tui.cli.progress import Progress
from trainfast_tui.text.cooling import cooling_words


def report_cooling(plan: RunPlan, below_c: float) -> None:
    """Wait until every watched GPU is below `below_c`; raises UserError if it never will be."""
    progress = Progress()

    def show(look: Cooling) -> None:
        progress.waiting(cooling_words(look.index, look.temperature_c, below_c, look.waited_s, look.stuck_s))

    try:
        wait_until_cool(plan.watched_uuids, below_c, show)
    finally:
        progress.close()

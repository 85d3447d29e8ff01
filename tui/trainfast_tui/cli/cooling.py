"""The wait of `--cool-to`, reported on stderr."""

from __future__ import annotations

import time
from contextlib import closing

from trainfast_runner.machine.cooling import LOOK_EVERY_S, cooling
from trainfast_runner.running.planning import RunPlan
from trainfast_tui.cli.progress import Progress
from trainfast_tui.text.cooling import cooling_words


def wait_until_cool(plan: RunPlan, below_c: float) -> None:
    """Wait until every watched GPU is below `below_c`; raises UserError if it never will be."""
    progress = Progress()
    try:
        with closing(cooling({gpu.uuid for gpu in plan.watched if gpu.uuid}, below_c)) as looks:
            for look in looks:
                progress.waiting(cooling_words(look.index, look.temperature_c, below_c, look.waited_s, look.stuck_s))
                time.sleep(LOOK_EVERY_S)
    finally:
        progress.close()

"""`--cool-to` in a search: each process starts only when the GPUs are below a temperature."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing

from trainfast_runner.machine import cooling
from trainfast_runner.machine.cooling import Cooling
from trainfast_runner.running.planning import RunPlan
from trainfast_runner.search.conducting.waiting import IDLE_POLL_S, wait_until
from trainfast_runner.search.journal.lines import CoolingDown


def check_coolable(plan: RunPlan, below_c: float | None) -> None:
    """Raise UserError if the watched GPUs have no temperature reading, or cannot cool below `below_c`."""
    if below_c is not None:
        with closing(cooling.cooling(plan.watched_uuids, below_c)) as polls:
            next(polls, None)


def cool_down(
    plan: RunPlan, below_c: float | None, write: Callable[[CoolingDown], None], raise_if_cancelled: Callable[[], None]
) -> None:
    """Return when every watched GPU is below `below_c`; at once when that is None.

    `write` gets a line at the first poll, at each new whole degree of the hottest GPU, and once when it stops falling.
    `raise_if_cancelled` is called throughout the wait and may raise. Raises UserError when the GPUs cool no further.
    """
    if below_c is None:
        return
    written_look: tuple[int, int, bool] | None = None

    def note(poll: Cooling) -> None:
        nonlocal written_look
        look = poll.index, round(poll.temperature_c), poll.stuck_s >= cooling.STUCK_NOTICE_S
        if look != written_look:
            written_look = look
            write(
                CoolingDown(
                    device=poll.index,
                    temperature_c=poll.temperature_c,
                    below_c=below_c,
                    waited_s=poll.waited_s,
                    stuck_s=poll.stuck_s,
                )
            )

    def wait(seconds: float) -> None:
        wait_until(lambda: False, raise_if_cancelled, time.monotonic() + seconds, IDLE_POLL_S)

    cooling.wait_until_cool(plan.watched_uuids, below_c, note, wait)

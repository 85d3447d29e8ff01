"""Notice that the terminal is gone when SIGHUP was ignored (nohup) or never came.

An app that keeps reading from a dead terminal spins; the run does not need the app.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable

GRACE_S = 3.0
"""Seconds that the app has to leave by itself once its terminal is gone."""
EXIT_STATUS = 129
"""128 + SIGHUP, as `EXIT_HUNG_UP` of the command line, which imports this package."""


def watch_for_hangup(fd: int, on_lost: Callable[[], object]) -> None:
    """Call `on_lost` from a thread when the terminal behind `fd` hangs up, then end the process."""
    if os.isatty(fd):
        threading.Thread(target=_wait, args=(fd, on_lost), name="terminal-watch", daemon=True).start()


def _wait(fd: int, on_lost: Callable[[], object]) -> None:
    poll = select.poll()
    # No input events: only a hang-up or an error ends the wait.
    poll.register(fd, 0)
    poll.poll()
    on_lost()
    # The last output goes to a terminal that no longer reads it.
    threading.Event().wait(GRACE_S)
    os._exit(EXIT_STATUS)

"""Notices that the terminal is gone, where SIGHUP was ignored (nohup) or never came.

An app that goes on reading from a dead terminal spins; leaving costs nothing, because the run does not need it.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable

GRACE_S = 3.0
EXIT_STATUS = 129
"""128 + SIGHUP."""


def watch(fd: int, on_lost: Callable[[], object]) -> None:
    """Call `on_lost` from a thread of its own once the terminal behind `fd` has hung up, then end the process."""
    if os.isatty(fd):
        threading.Thread(target=_wait, args=(fd, on_lost), name="terminal-watch", daemon=True).start()


def _wait(fd: int, on_lost: Callable[[], object]) -> None:
    poll = select.poll()
    # No input events: only a hang-up or an error ends the wait.
    poll.register(fd, 0)
    poll.poll()
    on_lost()
    # The goodbye is written to a terminal that no longer reads: do not wait for it for ever.
    threading.Event().wait(GRACE_S)
    os._exit(EXIT_STATUS)

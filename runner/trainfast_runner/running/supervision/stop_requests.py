"""Requests to end a run, which come as signals to its supervisor."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Iterable

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
WAKING_SIGNALS = (*STOP_SIGNALS, signal.SIGCHLD, signal.SIGHUP)


class StopRequests:
    """Takes SIGTERM, SIGINT and SIGUSR1 as requests, wakes up for SIGCHLD, and ignores SIGHUP.

    Handlers, not SIG_IGN: an ignored signal would stay ignored in the training.
    """

    def __init__(self) -> None:
        self._requests: list[int] = []
        self._readable, self._writable = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(self._writable, warn_on_full_buffer=False)
        for signum in WAKING_SIGNALS:
            signal.signal(signum, self._note)

    def wait(self, timeout_s: float, others: Iterable[int] = ()) -> None:
        """Sleep until a signal comes, one of `others` is readable, or the time is over."""
        poll = select.poll()
        for fd in (self._readable, *others):
            poll.register(fd, select.POLLIN)
        poll.poll(timeout_s * 1000)
        with contextlib.suppress(BlockingIOError):
            while os.read(self._readable, 512):
                continue

    def take(self) -> list[int]:
        """The requests since the last call, in order."""
        requests, self._requests = self._requests, []
        return requests

    def _note(self, signum: int, _frame: object) -> None:
        if signum in STOP_SIGNALS:
            self._requests.append(signum)

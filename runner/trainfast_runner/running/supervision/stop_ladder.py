"""The ladder of signals that ends a training."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Iterable

from trainfast_runner.machine.processes import Identity, descendants, send
from trainfast_runner.records.run_lines import Event


class StopLadder:
    """SIGTERM to the launcher, time to obey, then SIGKILL to all processes below this one. Never goes back a rung."""

    def __init__(self, grace_s: float, on_event: Callable[[Event], None]) -> None:
        self.asked_ns: int | None = None
        """Time of the first request; None without one."""
        self.granted_s = grace_s
        """Seconds between SIGTERM and SIGKILL; 0 when SIGKILL was asked for."""
        self.begun = False
        self.killing = False
        """True once SIGKILL was needed."""
        self.killed_ns: int | None = None
        """Time of the first SIGKILL."""
        self._on_event = on_event
        self._deadline_ns = 0

    def ask(self, child: Identity) -> None:
        """Note a request to end the training; a second one changes nothing."""
        if self.asked_ns is not None:
            return
        self.asked_ns = time.monotonic_ns()
        if not self.begun:
            self._begin(child, self.granted_s)
        self._on_event(Event(t_ns=self.asked_ns, kind="stop_requested", deadline_ns=self._deadline_ns))

    def kill_now(self, child: Identity) -> None:
        """End the training at once, as a person asked."""
        now_ns = time.monotonic_ns()
        if self.asked_ns is None:
            self.asked_ns = now_ns
        self.begun, self._deadline_ns, self.granted_s = True, now_ns, 0.0
        self._on_event(Event(t_ns=now_ns, kind="stop_requested", deadline_ns=now_ns))
        self.climb(child)

    def tear_down(self, child: Identity, grace_s: float) -> None:
        """End a broken training, without a request."""
        if not self.begun:
            self._begin(child, grace_s)

    def climb(self, child: Identity) -> None:
        """Past the deadline: send SIGKILL to every process below this one, new ones included."""
        if not self.begun or time.monotonic_ns() < self._deadline_ns:
            return
        if not self.killing:
            self.killing, self.killed_ns = True, time.monotonic_ns()
            self._on_event(Event(t_ns=self.killed_ns, kind="kill_sent", pid=child.pid))
        for process in descendants(os.getpid()):
            send(process, signal.SIGKILL)

    def _begin(self, child: Identity, grace_s: float) -> None:
        self.begun, self.granted_s = True, grace_s
        self._deadline_ns = time.monotonic_ns() + round(grace_s * 1e9)
        send(child, signal.SIGTERM)


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

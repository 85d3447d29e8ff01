"""Ending a training: SIGTERM to its launcher, time to obey, then SIGKILL over the whole tree."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from trainfast_runner.machine.processes.identity import Identity, descendants, send
from trainfast_runner.records.run_file import Event


class StopLadder:
    """The rungs for the process tree below this process. Asking again changes nothing; it only ever goes up."""

    def __init__(self, grace_s: float, tell: Callable[[Event], None]) -> None:
        self.asked_ns: int | None = None
        """When somebody asked for the end; None when nobody did."""
        self.granted_s = grace_s
        """Seconds between SIGTERM and SIGKILL; 0 when SIGKILL was asked for."""
        self.begun = False
        self.killing = False
        """Whether SIGKILL was needed."""
        self.killed_ns: int | None = None
        """When SIGKILL was first sent."""
        self._tell = tell
        self._deadline_ns = 0

    def ask(self, child: Identity) -> None:
        """Somebody wants the training to end."""
        if self.asked_ns is not None:
            return
        self.asked_ns = time.monotonic_ns()
        if not self.begun:
            self._begin(child, self.granted_s)
        self._tell(Event(t_ns=self.asked_ns, kind="stop_requested", deadline_ns=self._deadline_ns))

    def kill_now(self, child: Identity) -> None:
        """Somebody wants it to end at once."""
        now = time.monotonic_ns()
        if self.asked_ns is None:
            self.asked_ns = now
        self.begun, self._deadline_ns, self.granted_s = True, now, 0.0
        self._tell(Event(t_ns=now, kind="stop_requested", deadline_ns=now))
        self.climb(child)

    def tear_down(self, child: Identity, grace_s: float) -> None:
        """The training is broken and must end; nobody asked."""
        if not self.begun:
            self._begin(child, grace_s)

    def climb(self, child: Identity) -> None:
        """Past the deadline: SIGKILL to all that runs below this process, new arrivals included."""
        if not self.begun or time.monotonic_ns() < self._deadline_ns:
            return
        if not self.killing:
            self.killing, self.killed_ns = True, time.monotonic_ns()
            self._tell(Event(t_ns=self.killed_ns, kind="kill_sent", pid=child.pid))
        for process in descendants(os.getpid()):
            send(process, signal.SIGKILL)

    def _begin(self, child: Identity, grace_s: float) -> None:
        self.begun = True
        self._deadline_ns = time.monotonic_ns() + round(grace_s * 1e9)
        send(child, signal.SIGTERM)

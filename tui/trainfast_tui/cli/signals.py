"""The signals that come while a command follows a run or a search."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Signals:
    """The signals that came since they were caught."""

    def __init__(self) -> None:
        self.received = threading.Event()
        """Set by the first signal; nothing may `wait` for it, since its handler may run within that."""
        self.interrupts = 0
        """Presses of Ctrl-C."""
        self.must_leave = False
        """True after SIGHUP or SIGTERM, which end the command and leave the run running."""

    def receive(self, signum: int, frame: FrameType | None) -> None:
        """Note a signal; the handler of all three."""
        self.received.set()
        if signum == signal.SIGINT:
            self.interrupts += 1
        else:
            self.must_leave = True


@contextmanager
def caught_signals() -> Iterator[Signals]:
    """Note SIGINT, SIGHUP and SIGTERM instead of dying of them, which could leave a half-started run behind."""
    signals = Signals()
    numbers = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)
    # A SIGHUP that is ignored (nohup) stays ignored.
    handlers = {number: signal.getsignal(number) for number in numbers}
    for number, handler in handlers.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, signals.receive)
    try:
        yield signals
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)

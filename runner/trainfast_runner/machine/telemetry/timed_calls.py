"""Calls into the driver that may never return, made so that only their own readings are late.

One thread makes all calls, because parallel callers only queue for the driver's lock. When a call outlasts its time,
that thread is left to it, and another goes on with the rest. A killable process instead would need seconds for each GPU
to open the driver again, and state D takes no signal.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

T = TypeVar("T")
_SHORTEST_SLEEP_S, _LONGEST_SLEEP_S = 0.01, 0.1
"""Seconds of sleep at a time while waiting."""
_MIN_TIMEOUT_S = 0.1
"""Least timeout, which halves with each hung call: 8 healthy GPUs answer in milliseconds."""
_STOPPING_TIMEOUT_S = 0.2
"""Time for a call at the end of the sampling."""


@dataclass
class Job(Generic[T]):
    """A call and its result. Belongs to the thread that runs it until it has `ended`."""

    call: Callable[[], T]
    result: T | None = None
    error: BaseException | None = None
    began_s: float | None = None
    """Time of the start, seconds of CLOCK_MONOTONIC."""
    ended: bool = False

    @property
    def age_s(self) -> float:
        """Seconds since the start of the call; 0 before it."""
        return 0.0 if self.began_s is None else time.monotonic() - self.began_s

    def run(self) -> None:
        """Make the call and keep its result or its error."""
        self.began_s = time.monotonic()
        try:
            self.result = self.call()
        except BaseException as error:  # the thread that waits for the job raises it again
            self.error = error
        self.ended = True


@dataclass
class _Round:
    """Jobs in order, and the end of them."""

    jobs: Sequence[Job[Any]]
    ended: threading.Event = field(default_factory=threading.Event)
    abandoned: bool = False
    """True once the round is abandoned: no further call is begun."""

    def run(self) -> None:
        for job in self.jobs:
            if self.abandoned:
                return
            job.run()
        self.ended.set()


class TimedCalls:
    """Runs calls one after another in a thread of its own. Use it from one thread."""

    def __init__(self, stopping: threading.Event | None = None) -> None:
        """Once `stopping` is set, no call is waited for longer than a fraction of a second."""
        self._stopping = stopping or threading.Event()
        self.cut_short = False
        """True if a call was given up early because `stopping` was set: it may not hang at all."""
        self._rounds: queue.SimpleQueue[_Round | None] | None = None

    def run(self, jobs: Sequence[Job[Any]], timeout_s: float) -> None:
        """Run the jobs; leave one behind that takes longer than `timeout_s` seconds.

        A job left behind may have `ended` later. An exception of a call is in the job's `error`. Each job that hangs
        halves the time for the next ones: a driver that hangs mostly does so for every GPU, and all jobs together
        then take little more than twice `timeout_s`.
        """
        waiting = list(jobs)
        while waiting:
            if self._rounds is None:
                self._rounds = queue.SimpleQueue()
                threading.Thread(target=_work, args=(self._rounds,), name="nvml-calls", daemon=True).start()
            round_of_jobs = _Round(waiting)
            self._rounds.put(round_of_jobs)
            hung_job = self._wait(round_of_jobs, timeout_s)
            if hung_job is None:
                return
            round_of_jobs.abandoned = True
            timeout_s = max(timeout_s / 2, min(timeout_s, _MIN_TIMEOUT_S))
            self.close()
            waiting = waiting[waiting.index(hung_job) + 1 :]

    def close(self) -> None:
        """Let the thread end, at once or when its call comes back."""
        if self._rounds is not None:
            self._rounds.put(None)
            self._rounds = None

    def _wait(self, round_of_jobs: _Round, timeout_s: float) -> Job[Any] | None:
        """The job that takes too long, or None when all have ended."""
        queued_s = time.monotonic()
        stalled_s = 0.0
        while True:
            current = next((job for job in round_of_jobs.jobs if not job.ended), None)
            if current is None:
                return None
            since_s = current.began_s if current.began_s is not None else queued_s
            now_s = time.monotonic()
            limit_s = min(timeout_s, _STOPPING_TIMEOUT_S) if self._stopping.is_set() else timeout_s
            left_s = since_s + limit_s + stalled_s - now_s
            if left_s <= 0 and current.began_s is not None:
                self.cut_short = self.cut_short or limit_s < timeout_s
                return current
            wait_s = min(max(left_s, _SHORTEST_SLEEP_S), _LONGEST_SLEEP_S)
            if round_of_jobs.ended.wait(wait_s):
                return None
            # A machine that had no time for this thread had none for the call either.
            stalled_s += max(0.0, time.monotonic() - now_s - wait_s)


def _work(rounds: queue.SimpleQueue[_Round | None]) -> None:
    while (round_of_jobs := rounds.get()) is not None:
        round_of_jobs.run()

"""Staying with a live run until it ends: its progress on stderr, Ctrl-C to stop it or to leave it."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from trainfast_runner.errors import UserError
from trainfast_runner.records.result import Result
from trainfast_runner.running.follower import Follower
from trainfast_runner.running.recovery import state_of
from trainfast_runner.running.stopping import kill_now, request_stop, stop_unsupervised
from trainfast_tui.cli.progress import Progress
from trainfast_tui.cli.results import result_of

LOOK_EVERY_S = 0.15
GRACE_S = 30.0
HUNG_UP = 129
STOPPING = f"stopping the run; SIGKILL follows after {GRACE_S:.0f} s, Ctrl-C again sends it now"


class Signals:
    """How often Ctrl-C was pressed, and whether the terminal has gone, since they were caught."""

    def __init__(self) -> None:
        self.interrupts = 0
        self.hung_up = False

    def _on(self, signum: int, frame: FrameType | None) -> None:
        if signum == signal.SIGINT:
            self.interrupts += 1
        else:
            self.hung_up = True


@contextmanager
def caught() -> Iterator[Signals]:
    """Count SIGINT and note SIGHUP and SIGTERM instead of dying of them, so that no half-started run is left behind."""
    signals = Signals()
    numbers = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)
    # A SIGHUP that is ignored (nohup) stays ignored.
    before = {number: signal.getsignal(number) for number in numbers}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, signals._on)
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def follow(directory: Path, signals: Signals, *, interrupt_stops: bool) -> Result | None:
    """The result once the run has ended; None when the run was left alone and goes on.

    Raises UserError when the run's records are gone, as after `runs rm`.

    With `interrupt_stops` the first Ctrl-C asks the run to stop (SIGKILL follows after 30 s) and the second kills it.
    """
    follower, progress = Follower(directory), Progress()
    handled = 0
    try:
        while True:
            snapshot = follower.poll()
            if snapshot.is_live:
                progress.show(snapshot)
            elif (result := result_of(directory)) is not None:
                # Until it is written, a moment after its supervisor said how the run ended, there is none.
                return result
            if signals.hung_up or (signals.interrupts and not interrupt_stops):
                return None
            if signals.interrupts > handled:
                handled = signals.interrupts
                progress.say("killing the run" if handled > 1 else STOPPING)
                _ask(directory, progress, now=handled > 1)
            time.sleep(LOOK_EVERY_S)
    finally:
        progress.close()


def stop(directory: Path, signals: Signals, *, now: bool = False) -> Result | None:
    """Ask a live run to stop, or kill it `now`, and wait for its end with the countdown. None when left by Ctrl-C."""
    while (state := state_of(directory)).state == "starting" and not state.supervised and not signals.interrupts:
        time.sleep(LOOK_EVERY_S)  # it is just being launched, and the supervisor is not there to be told
    _ask(directory, Progress(), now=now)
    return follow(directory, signals, interrupt_stops=False)


def _ask(directory: Path, progress: Progress, *, now: bool) -> None:
    """Start the ladder, or go to its end; where nobody watches over the run, do it from here."""
    try:
        if (kill_now if now else request_stop)(directory):
            return
        progress.say("nobody watches over this run: stopping its processes from here")
        stop_unsupervised(
            directory,
            0.0 if now else GRACE_S,
            lambda left_s: progress.waiting(f"stopping, SIGKILL in {max(0.0, left_s):.0f} s"),
        )
        progress.close()
    except UserError:
        return  # it ended by itself in between, which is what was asked for

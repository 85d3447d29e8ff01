"""Follow a live run to its end: progress on stderr, Ctrl-C to stop it or to leave it."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

from trainfast_runner.errors import UserError
from trainfast_runner.records.result import Result
from trainfast_runner.records.run_directory import RESULT_FILE
from trainfast_runner.running.final_result import result_or_none_while_live
from trainfast_runner.running.follower import Follower
from trainfast_runner.running.present_state import run_state
from trainfast_runner.running.stopping import STOP_GRACE_S, kill_now, request_stop, stop_unsupervised
from trainfast_runner.search.conducting.run_ends import Cancelled
from trainfast_tui.cli.printing.progress import Progress
from trainfast_tui.cli.signals import Signals

LOOK_EVERY_S, READ_EVERY_S = 0.15, 0.6
"""Seconds between two looks at result and signals, which are cheap, and between two reads of the records, which take
CPU time from the training."""
STOPPING_NOTICE = f"stopping the run; SIGKILL follows after {STOP_GRACE_S:.0f} s, Ctrl-C again sends it now"


def follow(directory: Path, signals: Signals, *, interrupt_stops: bool, printed: str = "") -> Result | None:
    """Follow the run and return its result; None if it was left running. `printed` is the status already on stderr.

    Raises UserError if the run's records are gone, as after `runs rm`.

    With `interrupt_stops` the first Ctrl-C asks the run to stop (SIGKILL after `STOP_GRACE_S`), the second kills it.
    """
    follower, progress = Follower(directory), Progress(printed=printed)
    read_due_s, handled_interrupts = 0.0, 0
    try:
        while True:
            if time.monotonic() >= read_due_s or (directory / RESULT_FILE).exists():
                read_due_s = time.monotonic() + READ_EVERY_S
                snapshot = follower.poll()
                if snapshot.is_live:
                    progress.show_run(snapshot)
                elif (result := result_or_none_while_live(directory)) is not None:
                    # The result is written a moment after the supervisor recorded the end.
                    return result
            if signals.must_leave or (signals.interrupts and not interrupt_stops):
                return None
            if signals.interrupts > handled_interrupts:
                handled_interrupts = signals.interrupts
                progress.print_line("killing the run" if handled_interrupts > 1 else STOPPING_NOTICE)
                with suppress(Cancelled):  # the next look sees the signal
                    _stop_or_kill(directory, progress, signals, kills=handled_interrupts > 1)
            time.sleep(LOOK_EVERY_S)
    finally:
        progress.close()


def stop_run(directory: Path, signals: Signals, *, kills: bool = False) -> Result | None:
    """Stop a live run, or with `kills` kill it at once, and wait with the countdown; None if Ctrl-C ended the wait."""
    # During the launch there is no supervisor yet that could stop the run.
    while (state := run_state(directory)).state == "starting" and not state.supervised:
        if signals.interrupts or signals.must_leave:
            return None
        time.sleep(LOOK_EVERY_S)
    with suppress(Cancelled):  # `follow` sees the signal
        _stop_or_kill(directory, Progress(), signals, kills=kills)
    return follow(directory, signals, interrupt_stops=False)


def _stop_or_kill(directory: Path, progress: Progress, signals: Signals, *, kills: bool) -> None:
    """Ask the supervisor to stop or kill the run; without a supervisor do it from here.

    Raises Cancelled if a signal comes before the processes of an unsupervised run have ended.
    """
    interrupts = signals.interrupts

    def on_tick(left_s: float) -> None:
        if signals.must_leave or signals.interrupts > interrupts:
            raise Cancelled
        progress.show_activity(f"stopping, SIGKILL in {max(0.0, left_s):.0f} s")

    try:
        if (kill_now if kills else request_stop)(directory):
            return
        progress.print_line("unsupervised run: stopping its processes directly")
        stop_unsupervised(directory, 0.0 if kills else STOP_GRACE_S, on_tick)
    except UserError:
        return  # the run has just ended by itself
    finally:
        progress.close()

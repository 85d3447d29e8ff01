"""Start and end runs for the session. Every call returns at once; its result is posted."""

from __future__ import annotations

import threading
import time
from functools import partial
from pathlib import Path

from trainfast_runner.errors import UserError
from trainfast_runner.records.file_locks import is_alive
from trainfast_runner.records.home import Home
from trainfast_runner.settings.spec import RunSpec
from trainfast_tui.control.messages import Notified, Post, RunGivenUp, RunRefused, RunStarted, TrainingPython
from trainfast_tui.control.pending_start import PendingStart
from trainfast_tui.control.threads import start_thread
from trainfast_tui.text.keys import STOP_KEY
from trainfast_tui.text.script_notices import script_notices

GONE_POLL_S = 0.1
GONE_WITHIN_S = 60.0
"""Seconds that a stopped run has to be gone; its supervisor sends SIGKILL after `STOP_GRACE_S`."""


class RunControl:
    """Talks to supervisors, which outlive the app."""

    def __init__(self, home: Home, post: Post, python: TrainingPython) -> None:
        self._home = home
        self._python = python
        self._post = post
        self.pending = PendingStart()
        """The run that was started here until it is on the screen."""
        self._giving_up: threading.Event | None = None
        """Exists while a run waits for another launch; setting it gives up."""

    @property
    def is_waiting(self) -> bool:
        """True while a run waits for another launch."""
        return self._giving_up is not None

    def give_up(self) -> None:
        """Start nothing after all. Does nothing when no run waits."""
        # The waiting thread may remove the event between two looks.
        if (giving_up := self._giving_up) is not None:
            giving_up.set()

    def start(self, spec: RunSpec, run_to_stop: Path | None = None) -> None:
        """Check and start a run, once `run_to_stop` is stopped and gone: posts RunStarted, RunRefused or RunGivenUp."""
        self.pending.begin()
        start_thread("start", partial(self._start, spec, run_to_stop), self._post, RunRefused)

    def request_stop(self, directory: Path) -> None:
        """Ask the run to end; its supervisor kills it after the countdown."""
        start_thread("stop", partial(self._stop, directory), self._post)

    def kill(self, directory: Path) -> None:
        """Send SIGKILL to all of the run's processes."""
        start_thread("kill", partial(self._kill, directory), self._post)

    def _start(self, spec: RunSpec, run_to_stop: Path | None) -> RunStarted | RunGivenUp:
        from trainfast_runner.machine.worker_programs import ProgramCancelled
        from trainfast_runner.running import launch
        from trainfast_runner.running.scripts.script_plan import plan_spec
        from trainfast_runner.search.speed.device_speed_model import with_predicted_speed

        # A refusal comes before anything is stopped for this run.
        plan = plan_spec(spec, self._python)
        if run_to_stop is not None:
            self.stop_and_wait(run_to_stop)
        notices = list(script_notices(plan))
        if plan.devices_reason is not None:
            notices.append(plan.devices_reason)
        if notices:
            # One message: the status line shows only the newest.
            self._post(Notified("; ".join(notices)))

        def on_wait(holder: str) -> None:
            if holder:
                self._giving_up = threading.Event()
                self._post(Notified(f"Waiting for {holder}; {STOP_KEY} gives up", "warning"))
            if self._giving_up is not None and self._giving_up.is_set():
                raise ProgramCancelled

        try:
            return RunStarted(launch.start(with_predicted_speed(plan, self._home), self._home, on_wait))
        except ProgramCancelled:
            return RunGivenUp("The wait was given up; nothing was started.")
        finally:
            self._giving_up = None

    def _stop(self, directory: Path) -> Notified:
        from trainfast_runner.running.stopping import STOP_GRACE_S, request_stop, stop_unsupervised

        if request_stop(directory):
            return Notified("The run was asked to stop.")
        stop_unsupervised(directory, STOP_GRACE_S, lambda left_s: None)
        return Notified("The run was stopped and cleaned up.")

    def _kill(self, directory: Path) -> Notified:
        from trainfast_runner.running.stopping import kill_now, stop_unsupervised

        if not kill_now(directory):
            stop_unsupervised(directory, 0.0, lambda left_s: None)
        return Notified("The run was killed.")

    def stop_and_wait(self, directory: Path) -> None:
        """Stop a run and wait until all its processes are gone; not on the event loop. Raises UserError."""
        from trainfast_runner.running.present_state import run_state

        if is_alive(directory):
            try:
                self._stop(directory)
            except UserError:
                # A run that has just ended by itself refuses to be stopped; its processes may take a moment more.
                if not run_state(directory).ended:
                    raise
        deadline = time.monotonic() + GONE_WITHIN_S
        while is_alive(directory):
            if time.monotonic() > deadline:
                raise UserError(f"{directory.name} is still there: {STOP_KEY} again kills it", key=directory.name)
            time.sleep(GONE_POLL_S)

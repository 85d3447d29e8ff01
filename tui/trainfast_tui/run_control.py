"""Starting and ending runs from the screen. Every call returns at once; what came of it is posted."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from textual.message import Message

from trainfast_runner.home import Home, is_alive
from trainfast_runner.problem import Problem
from trainfast_runner.spec import RunSpec
from trainfast_tui.background import in_background
from trainfast_tui.messages import RunStarted, Said, said_no

LOOK_EVERY_S = 0.1
GRACE_S = 30.0
"""What a run without a supervisor gets between SIGTERM and SIGKILL, as the supervisor would give it."""
GIVE_UP_S = 60.0


class RunControl:
    """Talks to supervisors. `post` takes messages from any thread; `python` trains, None for this one."""

    def __init__(self, home: Home, post: Callable[[Message], object], python: str | None = None) -> None:
        self._home = home
        self._python = python
        self._post = post
        self._is_starting = False
        self._unseen: Path | None = None

    @property
    def is_starting(self) -> bool:
        """Whether a run was asked for that neither came onto the screen nor was refused."""
        return self._is_starting or self._unseen is not None

    def note_started(self, directory: Path) -> None:
        """The run asked for is there; what the reader shows may still be the one before."""
        self._is_starting, self._unseen = False, directory

    def note_refused(self) -> None:
        """The run asked for will not come."""
        self._is_starting = False

    def note_shown(self, directory: Path | None) -> None:
        """The reader shows this run."""
        if self._unseen is not None and (directory == self._unseen or not self._unseen.exists()):
            self._unseen = None

    def note_left(self) -> None:
        """Another run was chosen to be shown: do not wait for the one that was started."""
        self._unseen = None

    def start(self, spec: RunSpec) -> None:
        """Check and start a run: RunStarted, or Refused."""
        self._is_starting = True
        in_background("start", lambda: self._start(spec), self._post)

    def stop(self, directory: Path) -> None:
        """Ask the run to end; its supervisor kills it after the countdown."""
        in_background("stop", lambda: self._stop(directory), self._post, said_no)

    def kill(self, directory: Path) -> None:
        """SIGKILL to all of the run at once."""
        in_background("kill", lambda: self._kill(directory), self._post, said_no)

    def stop_then_start(self, directory: Path, spec: RunSpec) -> None:
        """End one run and start the next as soon as nothing of the first is left."""
        self._is_starting = True
        in_background("stop then start", lambda: self._stop_then_start(directory, spec), self._post)

    def _start(self, spec: RunSpec) -> Message:
        from trainfast_runner import launch

        plan = launch.plan(spec, self._python)
        return RunStarted(launch.start(plan, self._home))

    def _stop(self, directory: Path) -> Message:
        from trainfast_runner.stopping import request_stop, stop_unsupervised

        if request_stop(directory):
            return Said("Asked to stop.")
        stop_unsupervised(directory, GRACE_S, lambda left: None)
        return Said("Stopped and cleaned up.")

    def _kill(self, directory: Path) -> Message:
        from trainfast_runner.stopping import kill_now, stop_unsupervised

        if not kill_now(directory):
            stop_unsupervised(directory, 0.0, lambda left: None)
        return Said("Killed.")

    def _stop_then_start(self, directory: Path, spec: RunSpec) -> Message:
        from trainfast_runner import launch

        # What cannot start is said before anything is stopped for it.
        plan = launch.plan(spec, self._python)
        self.end(directory)
        return RunStarted(launch.start(plan, self._home))

    def end(self, directory: Path) -> None:
        """Stop a run and wait until nothing of it is left; not on the event loop. Raises Problem."""
        if is_alive(directory):
            self._stop(directory)
        deadline = time.monotonic() + GIVE_UP_S
        while is_alive(directory):
            if time.monotonic() > deadline:
                raise Problem(f"{directory.name} is still there: s again kills it", key=directory.name)
            time.sleep(LOOK_EVERY_S)

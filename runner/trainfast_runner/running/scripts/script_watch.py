"""The supervisor's part in a user's own script: steps counted in its output, and a notice when there are none."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from trainfast_runner.records.run_file import RunFile
from trainfast_runner.records.state_words import NO_STEP
from trainfast_runner.results.script_figures import why_no_step
from trainfast_runner.running.scripts.log_steps import LogSteps

NO_STEP_S = 60.0
"""Time before the notice about a script without a step: it may only load, or take steps unseen."""


class ScriptWatch:
    """Follows one script. `notify` gets the sentence about a script that has reported no step for `no_step_s`."""

    def __init__(
        self, run: RunFile, directory: Path, output: Path, notify: Callable[[str], None], no_step_s: float = NO_STEP_S
    ) -> None:
        self._run = run
        self._directory = directory
        self._log_steps = LogSteps(run, directory, output)
        self._notify = notify
        self._no_step_s = no_step_s
        self._notified = False

    def count_steps(self, has_ended: bool) -> None:
        """Record the steps printed since the last call, by a script that `has_ended` all of them. Raises OSError."""
        self._log_steps.follow(to_the_end=has_ended)

    def look(self, in_training: bool) -> None:
        """Notify once, with the ways to report steps, that none has come; `in_training` is True after the first."""
        waited_s = (time.monotonic_ns() - self._run.clock.monotonic_ns) / 1e9
        if not in_training and waited_s > self._no_step_s and not self._notified:
            self._notified = True
            self._notify(f"{NO_STEP} in {self._no_step_s:g} s: {self.why_no_step()}")

    def why_no_step(self) -> str:
        """The reason that the hooks have reported no step."""
        return why_no_step(self._directory, self._run)

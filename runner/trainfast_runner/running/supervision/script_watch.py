"""The supervisor's part in a user's own script: steps counted in its output, and a notice when there are none."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from trainfast_runner.machine.processes import work_below
from trainfast_runner.records.capped_file import CappedFile
from trainfast_runner.records.run_file import RunFile
from trainfast_runner.records.run_states import NO_STEP
from trainfast_runner.results.script_figures import no_step_reason
from trainfast_runner.running.scripts.log_steps import LogSteps

NO_STEP_S = 60.0
"""Time before the notice about a script without a step: it may only load, or take steps unseen."""
BUSY_SHARE = 0.5
"""Processor time over elapsed time above which a script is busy: one that waits, as for a download, uses little."""


class ScriptWatch:
    """Follows one script. `notify` gets the sentence about a script that has reported no step for `no_step_s`.

    The script runs below this process.
    """

    def __init__(
        self,
        run: RunFile,
        directory: Path,
        output: CappedFile,
        notify: Callable[[str], None],
        no_step_s: float = NO_STEP_S,
    ) -> None:
        self._run = run
        self._directory = directory
        self._log_steps = LogSteps(run, directory, output)
        self._notify = notify
        self._every_s = self._due_s = no_step_s
        self._notified_compiling = self._notified = False

    def count_steps(self, has_ended: bool) -> None:
        """Record the steps printed since the last call; with `has_ended`, in the unfinished last line too.

        Raises OSError.
        """
        self._log_steps.follow(to_the_end=has_ended)

    def poll(self, in_training: bool) -> None:
        """Notify once that no step has come, with the ways to report steps; `in_training` is True after the first step.

        While compilers run, the notice names only them; the ways follow once they have ended.
        """
        waited_s = (time.monotonic_ns() - self._run.clock.monotonic_ns) / 1e9
        if in_training or self._notified or waited_s <= self._due_s:
            return
        work = work_below(os.getpid())
        unseen = f"{NO_STEP} in {self._due_s:g} s"
        self._due_s += self._every_s
        if work.compilers:
            if not self._notified_compiling:
                self._notified_compiling = True
                self._notify(f"{unseen}: the script is compiling ({', '.join(work.compilers)})")
            return
        self._notified = True
        is_busy = work.cpu_s > BUSY_SHARE * waited_s
        busy_text = f"its processes used {work.cpu_s:.0f} s of processor time, so it may still load or compile; "
        self._notify(f"{unseen}: {busy_text if is_busy else ''}{self.no_step_reason()}")

    def no_step_reason(self) -> str:
        """The reason that the hooks have reported no step."""
        return no_step_reason(self._directory, self._run)

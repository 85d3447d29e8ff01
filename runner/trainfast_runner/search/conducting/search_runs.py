"""The runs that a conductor of a search starts, one at a time: ordinary runs, or a warm process."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from trainfast_runner.records.home import Home
from trainfast_runner.records.result import Result
from trainfast_runner.running import busy_devices, launch
from trainfast_runner.running.planning import RunPlan
from trainfast_runner.search.conducting.run_ends import end_run, raise_if_stopped, wait_for_result
from trainfast_runner.search.conducting.warm_process import WarmProcess
from trainfast_runner.search.journal.lines import Line, Resumed, Waiting
from trainfast_runner.search.options import SearchOptions


class SearchRuns:
    """Starts and ends the runs of a search.

    `write` appends a line to the journal; `raise_if_cancelled` is called in every wait.
    """

    def __init__(
        self, home: Home, options: SearchOptions, write: Callable[[Line], None], raise_if_cancelled: Callable[[], None]
    ) -> None:
        self.process: WarmProcess | None = None
        """The warm process; None without one."""
        self._home, self._options = home, options
        self._write, self._raise_if_cancelled = write, raise_if_cancelled
        self._live_run: Path | None = None
        self._waited_s = 0.0
        """Seconds spent waiting for other runs."""

    def start(self, plan: RunPlan, role: str) -> Path:
        """Start a run once its devices are free; return its directory. Raises UserError."""
        while True:
            if self._options.wait:
                self._wait_for_devices(plan)
            try:
                self._live_run = launch.start(replace(plan, role=role), self._home, self._on_wait)
            except busy_devices.DevicesBusy:
                if not self._options.wait:
                    raise
                continue  # another waiting run was faster
            return self._live_run

    def start_process(self, plan: RunPlan, role: str) -> WarmProcess:
        """Start a warm process as `start` does a run, and return it before it is ready."""
        directory = self.start(plan, role)
        self.process = WarmProcess(directory, plan.world_size, self._raise_if_cancelled)
        return self.process

    def clock_s(self) -> float:
        """CLOCK_MONOTONIC in seconds, less the time spent waiting for other runs."""
        return time.monotonic() - self._waited_s

    def wait_for_end(self, directory: Path) -> Result:
        """Wait for the end of a run. Raises Cancelled if it was stopped, which is no outcome of its settings."""
        self._live_run = directory
        result = wait_for_result(directory, self._raise_if_cancelled)
        self._live_run = None
        raise_if_stopped(result)
        return result

    def end_process(self) -> None:
        """End the warm process, if there is one."""
        if self.process is not None:
            self.process.end()
            self._live_run = self.process = None

    def wait_for_process_end(self) -> Result:
        """Wait for the end of the warm process, which ends by itself, and return its result."""
        assert self.process is not None
        result = self.process.wait_for_end()
        self._live_run = self.process = None
        return result

    def stop(self) -> None:
        """End the run that is still live, if there is one, without waiting for its replies."""
        if self._live_run is not None:
            end_run(self._live_run)
        if self.process is not None:
            self.process.close()
        self._live_run = self.process = None

    def _on_wait(self, launching: str) -> None:
        self._raise_if_cancelled()
        if launching:
            self._write(Waiting(run_id=launching))

    def _wait_for_devices(self, plan: RunPlan) -> None:
        """Return when no other run uses the plan's devices; `clock_s` stands still meanwhile."""
        other = busy_devices.busy_with(plan, self._home)
        if other is None:
            return
        began_s = time.monotonic()
        self._write(Waiting(run_id=other.run_id))
        busy_devices.wait_for_devices(plan, self._home, lambda run, seconds: self._raise_if_cancelled())
        self._write(Resumed())
        self._waited_s += time.monotonic() - began_s

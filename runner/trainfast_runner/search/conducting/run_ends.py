"""The ends of a search's runs: wait for a result, detect a run that was stopped, end a run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

from trainfast_runner.errors import UserError
from trainfast_runner.records.file_locks import is_alive
from trainfast_runner.records.result import Result
from trainfast_runner.records.run_directory import read_result
from trainfast_runner.running.recovery import recover_result
from trainfast_runner.running.stopping import kill_now, request_stop, stop_unsupervised
from trainfast_runner.search.conducting.waiting import POLL_S

STOPS_WITHIN_S = 10.0
"""Seconds after which a run that was asked to stop is killed."""
RESULT_WITHIN_S = 5.0
"""Seconds within which the result of a run that is gone has to appear."""


class Cancelled(Exception):
    """Raised when a search, a bench or a wait must stop now: no further run is started."""


def raise_if_stopped(result: Result) -> None:
    """Raise Cancelled if the run was stopped or killed from outside, which is no outcome of its settings."""
    if result.state in ("stopped", "killed"):
        raise Cancelled


def wait_for_result(directory: Path, raise_if_cancelled: Callable[[], None]) -> Result:
    """Wait for the result of a run and return it. Raises UserError if the run ends without one."""
    watch = ResultWatch(directory)
    while (result := watch.result()) is None:
        raise_if_cancelled()
        time.sleep(POLL_S)
    return result


class ResultWatch:
    """Watches for the end of a run."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._gone_since: float | None = None

    def result(self) -> Result | None:
        """Return the result; None before it. Raises UserError if the run is gone without a readable result."""
        alive = is_alive(self._directory)
        result = read_result(self._directory) if alive else recover_result(self._directory)
        if result is not None or alive:
            self._gone_since = None
        elif self._gone_since is None:
            self._gone_since = time.monotonic()
        elif time.monotonic() - self._gone_since > RESULT_WITHIN_S:
            raise UserError(f"{self._directory.name} has no readable result", key=self._directory.name, exit_code=5)
        return result


def end_run(directory: Path) -> None:
    """Stop a live run and wait until its last process has ended; SIGKILL after 10 s."""
    deadline_s = time.monotonic() + STOPS_WITHIN_S
    try:
        if not request_stop(directory):
            stop_unsupervised(directory, STOPS_WITHIN_S)
            return
        while read_result(directory) is None and is_alive(directory):
            if time.monotonic() > deadline_s:
                kill_now(directory)
                deadline_s = math.inf
            time.sleep(POLL_S)
    except UserError:
        return  # the run ended by itself meanwhile


def end_text(result: Result) -> str:
    """Return the run, its state and the reason of its end."""
    return f"{result.run_id} ended {result.state}: {result.reason}"

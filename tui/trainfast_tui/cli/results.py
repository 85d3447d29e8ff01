"""The result of a run that has ended, written now if it was lost."""

from __future__ import annotations

from pathlib import Path

from trainfast_runner.errors import UserError
from trainfast_runner.records.home import is_alive
from trainfast_runner.records.result import Result
from trainfast_runner.records.run_file import EXIT_CODES
from trainfast_runner.running.recovery import settle, state_of


def result_of(directory: Path) -> Result | None:
    """Return the result, or None while the run is alive; raises UserError for a directory without records."""
    result = settle(directory)
    if result is None and not is_alive(directory):
        now = state_of(directory)
        if now.ended:
            raise UserError(
                f"{directory.name} has no result: {now.reason}", key=directory.name, exit_code=EXIT_CODES["lost"]
            )
    return result

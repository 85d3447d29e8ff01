"""The final result of a run, written now if the run was lost."""

from __future__ import annotations

from pathlib import Path

from trainfast_runner.errors import UserError
from trainfast_runner.records.file_locks import is_alive
from trainfast_runner.records.home import Home
from trainfast_runner.records.result import Result
from trainfast_runner.records.run_states import EXIT_CODES
from trainfast_runner.running.present_state import run_state
from trainfast_runner.running.recovery import recover_result


def result_or_none_while_live(directory: Path) -> Result | None:
    """Return the result, or None while the run is alive; raises UserError for a directory without records."""
    result = recover_result(directory)
    if result is None and (state := run_state(directory)).ended:
        is_unreadable = state.state == "unreadable"
        if not is_unreadable and is_alive(directory):
            return None  # its supervisor is about to write the result
        # It may have ended between the two looks.
        result = recover_result(directory)
        if result is None:
            raise UserError(
                f"{directory.name} has no result: {state.reason}",
                key=directory.name,
                exit_code=EXIT_CODES["unreadable" if is_unreadable else "lost"],
            )
    return result


def final_result(home: Home, run_id: str, command: str = "compare") -> Result:
    """Return the result of an ended run.

    Raises UserError while the run is alive, advising to repeat `command` after its end.
    """
    result = result_or_none_while_live(home.directory(run_id))
    if result is None:
        raise UserError(
            f"{run_id} is still running: its figures are not final",
            key=run_id,
            advice=f"trainfast-tui attach {run_id}, then {command}",
        )
    return result

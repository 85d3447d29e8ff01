"""Results of two ended runs, to be shown side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainfast_runner.errors import UserError
from trainfast_runner.records.home import Home
from trainfast_runner.records.roles import WARM_ROLES
from trainfast_tui.control.messages import RunsCompared
from trainfast_tui.text.keys import RUN_KEY

if TYPE_CHECKING:
    from trainfast_runner.records.result import Result


def compared_runs(home: Home, a: str, b: str) -> RunsCompared:
    """Return the results of two runs. Raises UserError for a run that has not ended."""
    from trainfast_runner.running.final_result import final_result

    return RunsCompared(final_result(home, a), final_result(home, b))


def compared_with_previous(home: Home, run_id: str) -> RunsCompared:
    """Return a run and the newest finished run before it, else the newest one after it; A is the older.

    Without another finished run, one that ended otherwise is taken. Raises UserError if there is none.
    """
    from trainfast_runner.running.final_result import final_result
    from trainfast_runner.running.recovery import recover_result

    ids = home.run_ids()
    before = [other_id for other_id in ids if other_id < run_id]
    after = [other_id for other_id in ids if other_id > run_id]
    ended: Result | None = None
    for other_id in (*reversed(before), *reversed(after)):
        result = recover_result(home.directory(other_id))
        if result is not None and result.role in WARM_ROLES:
            continue  # a warm process tries many settings, so it has no result of one
        ended = ended or result
        if result is not None and result.state == "finished":
            ended = result
            break
    if ended is None:
        raise UserError(f"There is no other ended run to compare with; turn a knob and press {RUN_KEY}.", key=run_id)
    result_of_run = final_result(home, run_id)
    return RunsCompared(ended, result_of_run) if ended.run_id < run_id else RunsCompared(result_of_run, ended)

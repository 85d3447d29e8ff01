"""Conduct a batch search to its end, of a preset or of a user's own script."""

from __future__ import annotations

from pathlib import Path

from trainfast_runner.records.home import Home
from trainfast_runner.search.batch.conductor import BatchConductor
from trainfast_runner.search.batch.preset_conductor import PresetBatchConductor
from trainfast_runner.search.batch.question import BatchPlan
from trainfast_runner.search.batch.script_conductor import ScriptBatchConductor
from trainfast_runner.search.conducting.conductor import SearchCaller, conduct_alone
from trainfast_runner.search.journal.batch import BatchEnded, BatchLine
from trainfast_runner.search.options import BatchSearchOptions


def conduct_batch(
    directory: Path,
    batch_plan: BatchPlan,
    home: Home,
    options: BatchSearchOptions,
    caller: SearchCaller[BatchLine],
) -> BatchEnded:
    """Conduct the search in `directory` to its end; record and return the end.

    Raises UserError when another process conducts the search, and when its device is in use.
    """

    def make_conductor() -> BatchConductor:
        plan, plan_script_run = batch_plan.plan, batch_plan.plan_script_run
        if plan_script_run is None:
            return PresetBatchConductor(directory, plan, home, options, caller)
        return ScriptBatchConductor(directory, plan, home, options, caller, plan_script_run)

    return conduct_alone(directory, make_conductor)

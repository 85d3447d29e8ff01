"""Conduct a batch search to its end, of a preset or of a user's own script."""

from __future__ import annotations

from pathlib import Path

from trainfast_runner.records.home import Home
from trainfast_runner.search.batch.batch_plan import BatchPlan
from trainfast_runner.search.batch.preset_conductor import PresetBatchConductor
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
    conductor_class = PresetBatchConductor if batch_plan.plan.script is None else ScriptBatchConductor
    return conduct_alone(directory, lambda: conductor_class(directory, batch_plan, home, options, caller))

"""Conduct a best-fit search to its end, of a preset or of a user's own script."""

from __future__ import annotations

from pathlib import Path

from trainfast_runner.records.home import Home
from trainfast_runner.search.best.planning.best_plan import BestPlan
from trainfast_runner.search.best.preset_conductor import PresetBestConductor
from trainfast_runner.search.best.script_conductor import ScriptBestConductor
from trainfast_runner.search.conducting.conductor import SearchCaller, conduct_alone
from trainfast_runner.search.journal.best import BestEnded, BestLine
from trainfast_runner.search.options import SearchOptions


def conduct_best(
    directory: Path, best_plan: BestPlan, home: Home, options: SearchOptions, caller: SearchCaller[BestLine]
) -> BestEnded:
    """Conduct the search in `directory` to its end; record and return the end.

    Raises UserError when another process conducts the search, when its device is in use, and when the budget does not
    pay for the baseline.
    """
    conductor_class = PresetBestConductor if best_plan.plan.script is None else ScriptBestConductor
    return conduct_alone(directory, lambda: conductor_class(directory, best_plan, home, options, caller))

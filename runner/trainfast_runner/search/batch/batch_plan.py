"""The plan of a batch search, checked against this machine."""

from __future__ import annotations

from dataclasses import dataclass

from trainfast_runner.running.planning import RunPlan
from trainfast_runner.search.conducting.script_runs import ScriptPlanner


@dataclass(frozen=True)
class BatchPlan:
    """A checked batch search: the plan of its runs, and the planner of a script's probes."""

    plan: RunPlan
    plan_script_run: ScriptPlanner | None = None
    """Plans the probes of a script; None for a preset."""

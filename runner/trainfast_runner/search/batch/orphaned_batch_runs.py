"""Runs that a killed conductor of a batch search left behind: to be ended or adopted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trainfast_runner.records.home import Home
from trainfast_runner.running.planning import RunPlan
from trainfast_runner.search.journal.batch import BatchLine, ConfirmationRun, Probe
from trainfast_runner.search.orphaned_runs import adopt_ended, adopt_one, end_if_live, runs_of_search
from trainfast_runner.worker.shared.search_roles import CONFIRMATION, PROBE


class OrphanedBatchRuns:
    """The runs of earlier conductors of a search."""

    def __init__(self, home: Home, search_id: str, lines: Sequence[BatchLine]) -> None:
        self._home = home
        recorded = {line.run_id for line in lines if isinstance(line, Probe | ConfirmationRun)}
        runs = runs_of_search(home, search_id)
        self._processes = [run_id for run_id, run in runs.items() if run.role == PROBE]
        unrecorded = {run_id: run for run_id, run in runs.items() if run_id not in recorded}
        self._probes = {run_id: run for run_id, run in unrecorded.items() if run.role == PROBE}
        self._confirmations = {run_id: run for run_id, run in unrecorded.items() if run.role == CONFIRMATION}

    def end_probes(self) -> None:
        """End the live processes that tried sizes, recorded or not; confirmation runs are adopted later."""
        for run_id in self._processes:
            end_if_live(self._home.directory(run_id))

    def adopt_probe(self, plan: RunPlan) -> Path | None:
        """Return the ended run of a script's probe with the plan's settings, if the journal lacks it; else None."""
        return adopt_ended(self._probes, self._home, plan)

    def adopt_confirmation(self, plan: RunPlan) -> Path | None:
        """Return the newest usable run of the plan without a recorded end, and end all others; None without one."""
        adopted = adopt_one(self._confirmations, self._home, plan)
        if adopted is not None:
            del self._confirmations[adopted.name]
        return adopted

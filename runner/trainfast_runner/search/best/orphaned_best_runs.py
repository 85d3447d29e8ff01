"""Runs that a killed conductor of a best-fit search left behind: to be ended, followed or adopted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from trainfast_runner.records.home import Home
from trainfast_runner.records.roles import COLD
from trainfast_runner.running.planning import RunPlan
from trainfast_runner.search.journal.best import BestLaunched, BestLine, ColdRun, Trial
from trainfast_runner.search.orphaned_runs import adopt_ended, adopt_one, end_if_live, is_usable, runs_of_search
from trainfast_runner.worker.shared.search_roles import TRIAL


class OrphanedBestRuns:
    """The runs of earlier conductors of a search that have no outcome in its journal."""

    def __init__(self, home: Home, search_id: str, lines: Sequence[BestLine]) -> None:
        self._home = home
        recorded = {line.run_id for line in lines if isinstance(line, Trial | ColdRun)}
        self._launched = {line.run_id: line for line in lines if isinstance(line, BestLaunched)}
        runs = runs_of_search(home, search_id) if len(lines) > 1 else {}
        self._warm = [run_id for run_id, run in runs.items() if run.role == TRIAL]
        unrecorded = {run_id: run for run_id, run in runs.items() if run_id not in recorded}
        self._trials = {run_id: run for run_id, run in unrecorded.items() if run.role == TRIAL}
        self._cold = {run_id: run for run_id, run in unrecorded.items() if run.role == COLD}

    def end_warm_processes(self) -> None:
        """End the warm processes; a trial under way is lost."""
        for run_id in self._warm:
            end_if_live(self._home.directory(run_id))

    def adopt_trial(self, plan: RunPlan) -> Path | None:
        """Return the ended run of a script's trial with the plan's settings, if the journal lacks it; else None."""
        return adopt_ended(self._trials, self._home, plan)

    def cold_runs(self) -> Iterator[tuple[BestLaunched, Path]]:
        """Yield each usable cold run, alive or not, whose launch the journal has."""
        for run_id in [run_id for run_id in self._cold if run_id in self._launched]:
            del self._cold[run_id]
            if is_usable(directory := self._home.directory(run_id)):
                yield self._launched[run_id], directory

    def adopt_cold_run(self, plan: RunPlan) -> Path | None:
        """Return the cold run of the plan's settings that was killed before its launch was recorded; end the others."""
        adopted = adopt_one(self._cold, self._home, plan)
        self._cold = {}
        return adopted

    def end_cold_runs(self) -> None:
        """End the cold runs that were not adopted."""
        for run_id in self._cold:
            end_if_live(self._home.directory(run_id))
        self._cold = {}

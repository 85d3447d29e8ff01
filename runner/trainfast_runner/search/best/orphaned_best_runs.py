"""Runs that a killed conductor of a best-fit search left behind: to be ended, followed or adopted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from trainfast_runner.records.home import Home
from trainfast_runner.records.roles import COLD
from trainfast_runner.running.planning import RunPlan
from trainfast_runner.search.conducting.orphaned_runs import OrphanedRuns, end_if_live, is_usable
from trainfast_runner.search.journal.best import Attempt, BestLaunched, BestLine
from trainfast_runner.worker.shared.search_roles import TRIAL


class OrphanedBestRuns(OrphanedRuns):
    """The orphaned runs of a best-fit search: trials, or warm processes, and cold runs."""

    def __init__(self, home: Home, search_id: str, lines: Sequence[BestLine]) -> None:
        recorded_run_ids = {line.run_id for line in lines if isinstance(line, Attempt)}
        super().__init__(home, search_id, recorded_run_ids, TRIAL, COLD, is_new=len(lines) == 1)
        self._launched = {line.run_id: line for line in lines if isinstance(line, BestLaunched)}

    def cold_runs(self) -> Iterator[tuple[BestLaunched, Path]]:
        """Yield each usable cold run, alive or not, whose launch the journal has."""
        for run_id in [run_id for run_id in self._measuring if run_id in self._launched]:
            del self._measuring[run_id]
            if is_usable(directory := self._home.directory(run_id)):
                yield self._launched[run_id], directory

    def adopt_measuring_run(self, plan: RunPlan) -> Path | None:
        """Return the cold run of the plan's settings that was killed before its launch was recorded; end the others."""
        directory = super().adopt_measuring_run(plan)
        self._measuring = {}
        return directory

    def end_cold_runs(self) -> None:
        """End the cold runs that were not adopted."""
        for run_id in self._measuring:
            end_if_live(self._home.directory(run_id))
        self._measuring = {}

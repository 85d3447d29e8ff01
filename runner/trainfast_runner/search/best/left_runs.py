"""Runs that a killed conductor of a best-fit search left behind: to be ended, followed, or taken as measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from trainfast_runner.records.file_locks import is_alive
from trainfast_runner.records.home import Home
from trainfast_runner.records.run_directory import read_result, read_run_file
from trainfast_runner.records.run_file import COLD, TRIAL, RunFile
from trainfast_runner.running.planning import RunPlan
from trainfast_runner.search.best.journal import BestLine, LaunchedBest, Race, Trial
from trainfast_runner.search.conductor import end_if_live

STAMP_CHARACTERS = len("20261121-054455")


class LeftRuns:
    """The runs of a search, made before this conductor, that its journal has no outcome of."""

    def __init__(self, home: Home, search_id: str, lines: Sequence[BestLine]) -> None:
        self._home = home
        recorded = {line.run_id for line in lines if isinstance(line, Trial | Race)}
        self._launched = {line.run_id: line for line in lines if isinstance(line, LaunchedBest)}
        runs = _runs_of(home, search_id) if len(lines) > 1 else {}
        self._warm = [run_id for run_id, run in runs.items() if run.role == TRIAL]
        self._cold = {run_id: run for run_id, run in runs.items() if run.role == COLD and run_id not in recorded}

    def end_warm_processes(self) -> None:
        """End the warm processes: a trial that was under way is not measured."""
        for run_id in self._warm:
            end_if_live(self._home.directory(run_id))

    def cold_runs(self) -> Iterator[tuple[LaunchedBest, Path]]:
        """Yield each cold run that the journal has the launch of, and that lives or ended by itself."""
        for run_id in [one for one in self._cold if one in self._launched]:
            del self._cold[run_id]
            if self._is_of_use(directory := self._home.directory(run_id)):
                yield self._launched[run_id], directory

    def take(self, plan: RunPlan) -> Path | None:
        """Return the cold run of the plan's settings that was killed before its launch was recorded; end the others."""
        found: Path | None = None
        for run_id, run in self._cold.items():
            directory = self._home.directory(run_id)
            same = all(getattr(run, name) == value for name, value in plan.spec.record_fields().items())
            if found is None and same and self._is_of_use(directory):
                found = directory
            else:
                end_if_live(directory)
        self._cold = {}
        return found

    def end(self) -> None:
        """End the cold runs that nothing takes."""
        for run_id in self._cold:
            end_if_live(self._home.directory(run_id))
        self._cold = {}

    @staticmethod
    def _is_of_use(directory: Path) -> bool:
        """True if the run lives, or ended by itself: one that was stopped has no figures."""
        result = read_result(directory)
        return is_alive(directory) if result is None else result.state in ("finished", "oom", "failed")


def _runs_of(home: Home, search_id: str) -> dict[str, RunFile]:
    """The search's runs, by id, oldest first. Ids begin with their time, and no run is older than its search."""
    since = search_id[:STAMP_CHARACTERS]
    found = {run_id: read_run_file(home.directory(run_id)) for run_id in home.run_ids() if run_id >= since}
    return {run_id: run for run_id, run in found.items() if run is not None and run.search_id == search_id}

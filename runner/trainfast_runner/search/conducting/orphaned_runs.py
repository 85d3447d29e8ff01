"""Runs that a killed conductor left behind: find them, adopt those with usable figures, end the others."""

from __future__ import annotations

from pathlib import Path

from trainfast_runner.records.file_locks import is_alive
from trainfast_runner.records.home import STAMP_CHARACTERS, Home
from trainfast_runner.records.run_directory import read_result, read_run_file
from trainfast_runner.records.run_file import RunFile
from trainfast_runner.running.planning import RunPlan
from trainfast_runner.search.conducting.run_ends import end_run


def runs_of_search(home: Home, search_id: str) -> dict[str, RunFile]:
    """Return the search's runs, by id, oldest first. Ids begin with their time, and no run is older than its search."""
    since = search_id[:STAMP_CHARACTERS]
    runs = {run_id: read_run_file(home.directory(run_id)) for run_id in home.run_ids() if run_id >= since}
    return {run_id: run for run_id, run in runs.items() if run is not None and run.search_id == search_id}


def has_settings(run: RunFile, plan: RunPlan) -> bool:
    """True if the run was started with the plan's model, data and knobs."""
    return (run.model, run.data, run.knobs) == (plan.spec.model, plan.spec.data, plan.spec.knobs)


def is_usable(directory: Path) -> bool:
    """True if the run lives, or ended by itself: a stopped run has no figures."""
    result = read_result(directory)
    return is_alive(directory) if result is None else result.state in ("finished", "oom", "failed")


def end_if_live(directory: Path) -> None:
    """End a run if it is still live."""
    if read_result(directory) is None and is_alive(directory):
        end_run(directory)


class OrphanedRuns:
    """The runs of earlier conductors of a search; `recorded` are the ids of those whose outcome its journal has.

    A trying run is a probe or a trial, or the warm process that takes them; a measuring run confirms, or is cold.
    """

    def __init__(
        self,
        home: Home,
        search_id: str,
        recorded: set[str],
        trying_role: str,
        measuring_role: str,
        *,
        is_new: bool,
    ) -> None:
        self._home = home
        # A new search has no runs: its home is not listed.
        runs = {} if is_new else runs_of_search(home, search_id)
        unrecorded = {run_id: run for run_id, run in runs.items() if run_id not in recorded}
        self._all_trying = [run_id for run_id, run in runs.items() if run.role == trying_role]
        self._trying = {run_id: run for run_id, run in unrecorded.items() if run.role == trying_role}
        self._measuring = {run_id: run for run_id, run in unrecorded.items() if run.role == measuring_role}

    def end_trying_runs(self) -> None:
        """End the live trying runs, recorded or not; one under way is lost."""
        for run_id in self._all_trying:
            end_if_live(self._home.directory(run_id))

    def adopt_trying_run(self, plan: RunPlan) -> Path | None:
        """Return a script's ended trying run of the plan's settings that the journal lacks; None without one.

        A failed run is not adopted: the conductor's end may have killed a process of the run.
        """
        for run_id, run in self._trying.items():
            result = read_result(self._home.directory(run_id))
            if has_settings(run, plan) and result is not None and result.state in ("finished", "oom"):
                del self._trying[run_id]
                return self._home.directory(run_id)
        return None

    def adopt_measuring_run(self, plan: RunPlan) -> Path | None:
        """Return the newest usable measuring run of the plan's settings, if the journal lacks its outcome; else None.

        All other measuring runs are ended.
        """
        adopted_directory: Path | None = None
        for run_id, run in reversed(self._measuring.items()):
            directory = self._home.directory(run_id)
            if adopted_directory is None and has_settings(run, plan) and is_usable(directory):
                adopted_directory = directory
            else:
                end_if_live(directory)
        if adopted_directory is not None:
            del self._measuring[adopted_directory.name]
        return adopted_directory

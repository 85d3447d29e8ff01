"""The live runs that are not on the screen: left for another run, or started at another terminal or by a script."""

from __future__ import annotations

from pathlib import Path

from trainfast_runner.records.home import Home
from trainfast_runner.records.run_directory import RUN_FILE, is_unfinished, read_run_file


class OtherRuns:
    """Finds live runs other than the one on the screen.

    Every `look` tries the lock of each unended run; it lists the runs only the first time, and after their folder has
    changed.
    """

    def __init__(self, home: Home) -> None:
        self.live_id: str | None = None
        """Id of the newest live run that is not shown, as of the last look; None if there is none."""
        self.started_elsewhere_id: str | None = None
        """Id of the newest live run that began after the first look, was never shown and is not a search's; or None."""
        self._home = home
        self._changed_ns: int | None = None
        """The time at which the folder of runs had changed last; None before the first look."""
        self._listed_ids: frozenset[str] | None = None
        """Ids of all runs at the last look; None before the first."""
        self._unended_ids: list[str] = []
        """Ids of the runs that have not ended as far as is known, newest first."""
        self._new_ids: set[str] = set()
        """Ids of runs that came after the first look and were not shown yet."""

    def look(self, shown_directory: Path | None) -> None:
        """Look for live runs other than that of `shown_directory`."""
        self._look_for_new()
        unended_ids: list[str] = []
        live_ids: list[str] = []
        for run_id in self._unended_ids:
            directory = self._home.directory(run_id)
            if directory == shown_directory:
                self._new_ids.discard(run_id)
                unended_ids.append(run_id)
                continue
            # Looked for before the lock is tried: a launch takes the lock before it writes `run.json`.
            is_launched = (directory / RUN_FILE).exists()
            if is_unfinished(directory):
                live_ids.append(run_id)
                unended_ids.append(run_id)
            elif not is_launched:
                unended_ids.append(run_id)
        self._unended_ids = unended_ids
        self.live_id = next(iter(live_ids), None)
        self.started_elsewhere_id = next((run_id for run_id in live_ids if self._is_started_elsewhere(run_id)), None)

    def _is_started_elsewhere(self, run_id: str) -> bool:
        if run_id not in self._new_ids:
            return False
        run_file = read_run_file(self._home.directory(run_id))
        return run_file is not None and run_file.role is None

    def _look_for_new(self) -> None:
        try:
            changed_ns = self._home.runs.stat().st_mtime_ns
        except OSError:
            changed_ns = 0  # there is no run yet
        if changed_ns == self._changed_ns:
            return
        run_ids = self._home.run_ids()
        # Set after the look, so that an unreadable home is reported each time.
        self._changed_ns = changed_ns
        new_ids = set(run_ids) - (self._listed_ids or frozenset())
        if self._listed_ids is not None:
            self._new_ids |= new_ids
        self._unended_ids = [run_id for run_id in reversed(run_ids) if run_id in new_ids or run_id in self._unended_ids]
        self._listed_ids = frozenset(run_ids)

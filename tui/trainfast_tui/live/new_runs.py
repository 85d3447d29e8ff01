"""Runs that were started elsewhere while the app is open: at another terminal, or by a script."""

from __future__ import annotations

from pathlib import Path

from trainfast_runner.records.home import Home
from trainfast_runner.records.run_directory import RESULT_FILE, is_unfinished, read_run_file


class NewRuns:
    """Finds runs that came after the first look; while none comes a look is one `stat`."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._changed_ns: int | None = None
        self._known: frozenset[str] | None = None
        self._new: list[str] = []
        """Ids of runs that were not shown yet, newest last."""

    def newest(self, shown: Path | None) -> str | None:
        """Return the id of the newest live run other than `shown` and the runs of a search; None if there is none."""
        self._look_for_new()
        for run_id in reversed(self._new):
            directory = self._home.directory(run_id)
            run = read_run_file(directory)
            if directory == shown or (directory / RESULT_FILE).exists() or (run is not None and run.role is not None):
                self._new.remove(run_id)
            elif run is not None and is_unfinished(directory):  # else its files are still being written
                return run_id
        return None

    def _look_for_new(self) -> None:
        try:
            changed_ns = self._home.runs.stat().st_mtime_ns
        except OSError:
            changed_ns = 0  # there is no run yet
        if changed_ns == self._changed_ns:
            return
        every = self._home.run_ids()
        # Set after the look, so that an unreadable home is reported each time.
        self._changed_ns = changed_ns
        if self._known is not None:
            self._new += [run_id for run_id in every if run_id not in self._known]
        self._known = frozenset(every)

"""The run and the searches to follow: the newest of the home, or the chosen ones.

Imports stand in functions: the session is made before the first frame, and follows nothing until after it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from trainfast_runner.records.home import Home
from trainfast_tui.live.search_kind import SearchKind
from trainfast_tui.live.snapshot import SearchSnapshot, SearchSnapshotT

if TYPE_CHECKING:
    from trainfast_runner.running.follower import Follower, RunSnapshot
    from trainfast_runner.search.batch.batch_follower import BatchFollower
    from trainfast_runner.search.best.best_follower import BestFollower

LOOK_AGAIN_S = 2.0
"""Seconds between two looks for a search that was started elsewhere, while the followed one does nothing."""


class FollowedDirectory:
    """The directory to follow: a chosen one, or else the result of `find`, until either is forgotten or replaced.

    Safe from any thread.
    """

    def __init__(self, find: Callable[[], Path | None]) -> None:
        self._find = find
        self._lock = threading.Lock()
        """Held while both fields below change, so that `find` never replaces a directory that was chosen meanwhile."""
        self._directory: Path | None = None
        self.is_known = False

    def follow(self, directory: Path) -> None:
        """Follow this directory from now on."""
        with self._lock:
            self._directory, self.is_known = directory, True

    def replace(self, before: Path | None, after: Path) -> bool:
        """Follow `after` if `before` still is followed; return True if so."""
        with self._lock:
            is_unchanged = self._directory == before
            if is_unchanged:
                self._directory, self.is_known = after, True
        return is_unchanged

    @property
    def directory(self) -> Path | None:
        """The directory, without a call of `find`; None if none is known yet."""
        return self._directory

    def find_or_get(self) -> Path | None:
        """Return the chosen directory, or else the result of `find`. Raises the errors of `find`."""
        if not self.is_known:
            directory = self._find()
            with self._lock:
                if not self.is_known:
                    self._directory, self.is_known = directory, True
        return self._directory

    def forget(self, directory: Path) -> None:
        """Look for another directory next time, unless another was chosen meanwhile."""
        with self._lock:
            if self._directory == directory:
                self.is_known = False


class FollowedRun(FollowedDirectory):
    """The followed run, at first the newest of the home."""

    def __init__(self, home: Home) -> None:
        super().__init__(partial(_newest_run, home))
        self._follower: Follower | None = None

    def poll(self) -> RunSnapshot | None:
        """Return a snapshot of the run; None without one. A deleted run is followed no more."""
        from trainfast_runner.running.follower import Follower

        directory = self.find_or_get()
        if directory is not None and not directory.exists():
            self.forget(directory)
            directory = None
        if directory is None:
            self._follower = None
            return None
        if self._follower is None or self._follower.directory != directory:
            self._follower = Follower(directory)
        return self._follower.poll()


PolledT = TypeVar("PolledT", bound=SearchSnapshot, covariant=True)


class JournalFollower(Protocol[PolledT]):
    """Follows the journal of one search."""

    directory: Path

    def poll(self) -> PolledT:
        """Read the new lines and return a snapshot."""
        ...


class FollowedSearch(FollowedDirectory, Generic[SearchSnapshotT]):
    """The followed search of one kind, at first the newest of the home; `open_journal` follows its journal."""

    def __init__(
        self, home: Home, kind: SearchKind, open_journal: Callable[[Path], JournalFollower[SearchSnapshotT]]
    ) -> None:
        super().__init__(partial(_newest_search, home, kind))
        self._open_journal = open_journal
        self._follower: JournalFollower[SearchSnapshotT] | None = None
        self.newest: SearchSnapshotT | None = None
        """The newest snapshot; None without a search."""
        self._looked_elsewhere_s = time.monotonic()

    def poll(self) -> SearchSnapshotT | None:
        """Return a snapshot of the search; None without one."""
        directory = self.find_or_get()
        if directory is None:
            self._follower = None
        elif self._follower is None or self._follower.directory != directory:
            self._follower = self._open_journal(directory)
        search = None if self._follower is None else self._follower.poll()
        self.newest = search if search is not None and search.is_live else self._started_elsewhere(directory) or search
        return self.newest

    def _started_elsewhere(self, directory: Path | None) -> SearchSnapshotT | None:
        """Follow a live search that was started at another terminal; None without one."""
        if time.monotonic() - self._looked_elsewhere_s < LOOK_AGAIN_S:
            return None
        newest = self._find()
        # Set after the look, so that an unreadable home is reported each time.
        self._looked_elsewhere_s = time.monotonic()
        if newest is None or newest == directory:
            return None
        follower = self._open_journal(newest)
        search = follower.poll()
        if not search.is_live or not self.replace(directory, newest):
            return None
        self._follower = follower
        return search


def open_batch_journal(directory: Path) -> BatchFollower:
    """Return a follower of the journal of this batch search."""
    from trainfast_runner.search.batch.batch_follower import BatchFollower

    return BatchFollower(directory)


def open_best_journal(directory: Path) -> BestFollower:
    """Return a follower of the journal of this best-fit search."""
    from trainfast_runner.search.best.best_follower import BestFollower

    return BestFollower(directory)


def _newest_search(home: Home, kind: SearchKind) -> Path | None:
    from trainfast_runner.search.searches import BATCH_KIND, BEST_KIND, newest_search

    return newest_search(home, BEST_KIND if kind is SearchKind.BEST else BATCH_KIND)


def _newest_run(home: Home) -> Path | None:
    from trainfast_runner.running.follower import newest_run

    return newest_run(home)

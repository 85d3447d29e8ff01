"""Start, pause and end searches for the session. Every call returns at once; its result is posted."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import ClassVar, Generic

from trainfast_runner.records.home import Home
from trainfast_runner.records.search_states import PAUSE_STATES
from trainfast_runner.settings.spec import RunSpec
from trainfast_tui.control.messages import Notified, Post, SearchEnded, SearchRefused, SearchStarted, TrainingPython
from trainfast_tui.control.pending_start import PendingStart
from trainfast_tui.control.threads import start_thread
from trainfast_tui.live.search_kind import SearchKind
from trainfast_tui.live.snapshot import SearchSnapshotT

NOT_LIVE = Notified("There is no live search.", "warning")
STILL_STARTING = Notified("The search is starting; press the key again once it runs.", "warning")


class SearchControl(ABC, Generic[SearchSnapshotT]):
    """Talks to the conductors of one kind of search, which outlive the app."""

    KIND: ClassVar[SearchKind]

    def __init__(self, home: Home, post: Post, python: TrainingPython) -> None:
        self._home = home
        self._post = post
        self._python = python
        self._snapshot: SearchSnapshotT | None = None
        """The newest snapshot of the followed search, also while another one is starting."""
        self._unended_directory: Path | None = None
        """The search that was started here or was live, until its end is posted."""
        self._pending = PendingStart()
        """The search that was started here, until the reader shows it."""
        # The fields below are about the newest start: each `start` sets all of them anew.
        self.requested_ns: int | None = None
        """CLOCK_MONOTONIC at which the search was started."""
        self._seen_before_start: SearchSnapshotT | None = None
        """The followed search when the start began; a continued search may be seen as it was then."""
        self._stop_when_seen = False
        """True if the search is to be stopped as soon as the reader shows it; counts only while it is pending."""
        self._dismissed_directory: Path | None = None
        """The ended search that was followed when the start was refused; else None."""

    @property
    def current(self) -> SearchSnapshotT | None:
        """The newest snapshot of the followed search; None while another one is starting or after it was refused."""
        search = self._snapshot
        is_outdated = search is None or self._pending.is_pending or search.directory == self._dismissed_directory
        return None if is_outdated else search

    @property
    def is_starting(self) -> bool:
        """True from a search's start until it is seen or refused."""
        return self._pending.is_pending

    @property
    def is_active(self) -> bool:
        """True while a search works, and from its start until it is seen or refused."""
        return self._pending.is_pending or (self._snapshot is not None and self._snapshot.is_live)

    def note_started(self, directory: Path) -> None:
        """Record that the started search holds its lock; the reader may still show the search before."""
        self._pending.note_started(directory)
        self._unended_directory = directory

    def note_refused(self) -> None:
        """Record that the search to be started was refused."""
        self._pending.note_refused()
        search = self._snapshot
        self._dismissed_directory = search.directory if search is not None and not search.is_live else None

    def note_seen(self, search: SearchSnapshotT | None) -> None:
        """Record the search that the reader shows, and post that it was started elsewhere or has ended.

        A search that was to be stopped as soon as it started is stopped.
        """
        before, self._snapshot = self._snapshot, search
        if search is None:
            return
        is_new = before is None or before.directory != search.directory
        was_pending = self._pending.is_pending
        is_started_here = self._pending.note_seen(search.directory)
        if search.is_live:
            self._unended_directory = search.directory
            if is_new and not was_pending:
                self._post(Notified(f"A {self.KIND.label} search is live; {self.KIND.key} shows it."))
        elif search.directory == self._unended_directory and search != self._seen_before_start:
            self._unended_directory = None
            self._post(SearchEnded(self._describe(search), self.KIND))
        if is_started_here and self._stop_when_seen:
            # Not `stop`: this snapshot may be older than the lock of a continued search.
            start_thread("cancel", partial(self._cancel, search.directory), self._post)

    @abstractmethod
    def _describe(self, search: SearchSnapshotT) -> str:
        """Return the state of a search in words."""

    def start(
        self,
        spec: RunSpec,
        *,
        fresh: bool = False,
        stop_run_first: Callable[[], None] | None = None,
    ) -> None:
        """Start a search of `spec`, or unless `fresh` continue its unfinished one, once `stop_run_first` is done.

        Posts SearchStarted or SearchRefused.
        """
        self._pending.begin()
        self.requested_ns, self._seen_before_start = time.monotonic_ns(), self._snapshot
        self._stop_when_seen, self._dismissed_directory = False, None
        start = partial(self._start, self._starter(spec, fresh=fresh), stop_run_first)
        start_thread("search", start, self._post, lambda error: SearchRefused(error, self.KIND))

    def _start(self, starter: Callable[[], Path], stop_run_first: Callable[[], None] | None) -> SearchStarted:
        if stop_run_first is not None:
            stop_run_first()
        return SearchStarted(starter(), self.KIND)

    @abstractmethod
    def _starter(self, spec: RunSpec, *, fresh: bool) -> Callable[[], Path]:
        """Return what starts a search of this kind as it is asked for now, and returns its directory.

        It is called in a thread. Raises UserError.
        """

    def toggle_pause(self) -> Notified:
        """Pause the live search after its present step, or resume it.

        Return the notice to show, empty if the search was paused or resumed.
        """
        from trainfast_runner.search.control import pause, resume

        search = self.current
        if search is None or not search.is_live:
            return self.no_search_notice()
        toggle = resume if search.state in PAUSE_STATES else pause
        start_thread("pause", partial(toggle, search.directory), self._post)
        return Notified("")

    def no_search_notice(self) -> Notified:
        """Return the notice that no search is live, or that one is starting."""
        return STILL_STARTING if self._pending.is_pending else NOT_LIVE

    def stop(self) -> Notified:
        """End the live search, or a starting search as soon as the reader shows it; return the notice to show."""
        if self._pending.is_pending:
            # A search cannot be ended before it holds its lock.
            self._stop_when_seen = True
            return Notified("Stopping as soon as the search has started…", "warning")
        search = self.current
        if search is None or not search.is_live:
            return NOT_LIVE
        start_thread("cancel", partial(self._cancel, search.directory), self._post)
        return Notified("Stopping: the running process is ended, the journal is kept…", "warning")

    @staticmethod
    def _cancel(directory: Path) -> Notified | None:
        from trainfast_runner.search.control import cancel

        return None if cancel(directory) else Notified("The search has already ended.", "warning")

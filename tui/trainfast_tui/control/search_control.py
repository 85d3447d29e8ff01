"""Start, pause and end searches for the session. Every call returns at once; its result is posted."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainfast_runner.records.home import PAUSE_STATES, Home
from trainfast_runner.settings.spec import RunSpec
from trainfast_tui.control import messages
from trainfast_tui.control.run_control import PendingStart
from trainfast_tui.control.threads import start_thread
from trainfast_tui.live.snapshot import SearchKind

if TYPE_CHECKING:
    from trainfast_runner.search.best_journal import BestRequest
    from trainfast_tui.live.snapshot import SearchSnapshot


NOT_LIVE = messages.Notified("There is no live search.", "warning")
STILL_STARTING = messages.Notified("The search is starting; press the key again once it runs.", "warning")


class SearchControl:
    """Talks to the conductors of one kind of search, which outlive the app."""

    def __init__(self, kind: SearchKind, home: Home, post: messages.Post, python: messages.TrainingPython) -> None:
        self.kind = kind
        self._home = home
        self._post = post
        self._python = python
        self._snapshot: SearchSnapshot | None = None
        """The newest snapshot of the followed search, also while another one is starting."""
        self._unended_directory: Path | None = None
        """The search that was started here or was live, until its end is posted."""
        self._pending = PendingStart()
        """The search that was started here, until the reader shows it."""
        # The fields below are about the newest start: each `start` sets all of them anew.
        self.requested_ns: int | None = None
        """CLOCK_MONOTONIC at which the search was started."""
        self._seen_before_start: SearchSnapshot | None = None
        """The followed search when the start began; a continued search may be seen as it was then."""
        self._stop_when_seen = False
        """True if the search is to be stopped as soon as the reader shows it; counts only while it is pending."""
        self._dismissed_directory: Path | None = None
        """The ended search that was followed when the start was refused; else None."""

    @property
    def current(self) -> Any:
        """The newest snapshot of the followed search, of this kind; None while another starts or was refused."""
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

    def note_seen(self, search: SearchSnapshot | None) -> list[messages.Notified]:
        """Record the search that the reader shows; return the notice that it was started elsewhere or has ended.

        A search that was to be stopped as soon as it started is stopped.
        """
        from trainfast_tui.text.best_words import ADDS_TIME
        from trainfast_tui.text.search_words import state_words

        before, self._snapshot = self._snapshot, search
        if search is None:
            return []
        is_new = before is None or before.directory != search.directory
        was_pending = self._pending.is_pending
        is_started_here = self._pending.note_seen(search.directory)
        if is_started_here and self._stop_when_seen:
            # Not `stop`: this snapshot may be older than the lock of a continued search.
            start_thread("cancel", partial(_cancel, search.directory), self._post)
        if search.is_live:
            self._unended_directory = search.directory
            if is_new and not was_pending:
                return [messages.Notified(f"A {self.kind.label} search is live; {self.kind.key} shows it.")]
        elif search.directory == self._unended_directory and search != self._seen_before_start:
            self._unended_directory = None
            words = f"The search has ended: {state_words(search).replace(ADDS_TIME, '')}. {self.kind.key} shows it."
            return [messages.Notified(words, except_on=self.kind)]
        return []

    def start(
        self,
        spec: RunSpec,
        *,
        fresh: bool = False,
        best: BestRequest | None = None,
        stop_run_first: Callable[[], None] | None = None,
    ) -> None:
        """Start a search of `spec`, or unless `fresh` continue its unfinished one, once `stop_run_first` is done.

        `best` is the question of a best-fit search. Posts SearchStarted or SearchRefused.
        """
        self._pending.begin()
        self.requested_ns, self._seen_before_start = time.monotonic_ns(), self._snapshot
        self._stop_when_seen, self._dismissed_directory = False, None

        def start() -> messages.SearchStarted:
            from trainfast_runner.search.control import start_search

            if stop_run_first is not None:
                stop_run_first()
            directory = start_search(spec, self._home, self._python, fresh=fresh, best=best)
            return messages.SearchStarted(directory, self.kind)

        start_thread("search", start, self._post, lambda error: messages.SearchRefused(error, self.kind))

    def toggle_pause(self) -> messages.Notified:
        """Pause the live search after its present step, or resume it.

        Return the notice to show, empty if the search was paused or resumed.
        """
        from trainfast_runner.search.control import pause, resume

        search = self.current
        if search is None or not search.is_live:
            return STILL_STARTING if self._pending.is_pending else NOT_LIVE
        toggle = resume if search.state in PAUSE_STATES else pause
        start_thread("pause", partial(toggle, search.directory), self._post)
        return messages.Notified("")

    def stop(self) -> messages.Notified:
        """End the live search, or a starting search as soon as the reader shows it; return the notice to show."""
        if self._pending.is_pending:
            # A search cannot be ended before it holds its lock.
            self._stop_when_seen = True
            return messages.Notified("Stopping as soon as the search has started…", "warning")
        search = self.current
        if search is None or not search.is_live:
            return NOT_LIVE
        start_thread("cancel", partial(_cancel, search.directory), self._post)
        return messages.Notified("Stopping: the running process is ended, the journal is kept…", "warning")


def _cancel(directory: Path) -> messages.Notified | None:
    from trainfast_runner.search.control import cancel

    return None if cancel(directory) else messages.Notified("The search has already ended.", "warning")


class Searches:
    """The controls of both kinds of search."""

    def __init__(self, home: Home, post: messages.Post, python: messages.TrainingPython) -> None:
        self._by_kind = {kind: SearchControl(kind, home, post, python) for kind in SearchKind}

    def of(self, kind: SearchKind) -> SearchControl:
        """Return the control of this kind of search."""
        return self._by_kind[kind]

    @property
    def running_kind(self) -> SearchKind | None:
        """The kind of the search that uses the device; None without one."""
        return next((kind for kind in SearchKind if self.of(kind).is_active), None)

    def badge(self, now_ns: int) -> str:
        """Return a few words on the search that is going on, `● best fit 3/6 · 1:12 left`; empty without one."""
        from trainfast_tui.text.search_words import progress_words

        if (kind := self.running_kind) is None:
            return ""
        search = self.of(kind).current
        words = "starting" if search is None else progress_words(search, now_ns)
        return f"● {kind.label.replace('-', ' ')} {words}"

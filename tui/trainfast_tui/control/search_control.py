"""Starting, pausing and ending a search from the screen. Every call returns at once; what came of it is posted."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from textual.message import Message

from trainfast_runner.records.home import Home
from trainfast_runner.settings.spec import RunSpec
from trainfast_tui.control.background import in_background
from trainfast_tui.control.messages import Said, SearchRefused, SearchStarted, said_no

if TYPE_CHECKING:
    from trainfast_runner.search.search_follower import SearchSnapshot


class SearchControl:
    """Talks to the conductor of a search, which outlives the app. `python` trains, None for this one."""

    def __init__(self, home: Home, post: Callable[[Message], object], python: str | None = None) -> None:
        self._home = home
        self._post = post
        self._python = python
        self._seen: SearchSnapshot | None = None
        self._is_starting = False
        self._awaited: Path | None = None
        self._left: Path | None = None
        """The search that was followed when another was asked for, which was refused."""
        self.asked_ns: int | None = None
        """When the newest search was asked for; CLOCK_MONOTONIC."""

    @property
    def current(self) -> SearchSnapshot | None:
        """The search that is followed, as it was seen last; None while another one is started, or was refused."""
        seen = self._seen
        return None if self._is_starting or seen is None or seen.directory == self._left else seen

    @property
    def is_going_on(self) -> bool:
        """Whether a search works, or has been asked for and was neither seen nor refused yet."""
        return self._is_starting or (self._seen is not None and self._seen.is_live)

    def note_started(self, directory: Path) -> None:
        """The search asked for holds its lock; what the reader shows may still be the one before."""
        self._awaited = directory

    def note_refused(self) -> None:
        """The search asked for will not come."""
        self._is_starting = False
        self._left = self._seen.directory if self._seen is not None else None

    def note_seen(self, search: SearchSnapshot | None) -> str:
        """The reader shows this one; how it ended, in words, where it has since it was last seen."""
        before = self._seen
        self._seen = search
        if search is None:
            return ""
        if search.directory == self._awaited:
            self._is_starting, self._awaited = False, None
        was_live = before is not None and before.directory == search.directory and before.is_live
        if search.is_live or not was_live:
            return ""
        from trainfast_tui.text.batch_search import state_words

        return state_words(search)

    def start(
        self,
        spec: RunSpec,
        *,
        fresh: bool = False,
        cool_to_c: float | None = None,
        first: Callable[[], None] | None = None,
    ) -> None:
        """Start or continue a search, after `first` is done: SearchStarted, or SearchRefused.

        With `cool_to_c` each of its processes waits until its GPUs are below so many degrees Celsius.
        """
        self._is_starting, self._left, self.asked_ns = True, None, time.monotonic_ns()
        in_background("search", lambda: self._start(spec, fresh, cool_to_c, first), self._post, SearchRefused)

    def pause(self, directory: Path) -> None:
        """Have it wait after the probe it is at."""
        in_background("pause", lambda: self._pause(directory), self._post, said_no)

    def resume(self, directory: Path) -> None:
        """Let it go on."""
        in_background("resume", lambda: self._resume(directory), self._post, said_no)

    def cancel(self, directory: Path) -> None:
        """Have what runs stopped and the search ended; its journal stays."""
        in_background("cancel", lambda: self._cancel(directory), self._post, said_no)

    def _start(self, spec: RunSpec, fresh: bool, cool_to_c: float | None, first: Callable[[], None] | None) -> Message:
        from trainfast_runner.search.control import start_search

        if first is not None:
            first()
        return SearchStarted(start_search(spec, self._home, self._python, fresh=fresh, cool_to_c=cool_to_c))

    def _pause(self, directory: Path) -> None:
        from trainfast_runner.search.control import pause

        pause(directory)

    def _resume(self, directory: Path) -> None:
        from trainfast_runner.search.control import resume

        resume(directory)

    def _cancel(self, directory: Path) -> Message | None:
        from trainfast_runner.search.control import cancel

        return None if cancel(directory) else Said("It has ended already.", "warning")

"""A journal of either kind of search, read while its conductor writes it, and the state that it shows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from trainfast_runner.records.home import JOURNAL_FILE, LIVE_STATES, PAUSE_FILE, is_conducted
from trainfast_runner.records.json_lines import Tail

if TYPE_CHECKING:
    from trainfast_runner.search.batch_journal import BatchJournal
    from trainfast_runner.search.best_journal import BestJournal


AnyLineT = TypeVar("AnyLineT")


@dataclass(frozen=True)
class SearchSnapshot:
    """The state of a search of either kind at one moment.

    `state` is starting, running, pausing (finishing its step first), paused, interrupted (no conductor and no
    recorded end: the same command continues the search), answered, nothing_fits, failed or cancelled.
    """

    directory: Path
    state: str

    @property
    def is_live(self) -> bool:
        """True if a conductor works on the search."""
        return self.state in LIVE_STATES


class FollowedJournal(Generic[AnyLineT]):
    """The lines of a journal so far; `read` adds the new ones. Not safe to share between threads."""

    def __init__(self, directory: Path, line_type: Any) -> None:
        """`line_type` is the union of the lines that this kind of journal has."""
        self.directory = directory
        self.lines: tuple[AnyLineT, ...] = ()
        self._tail: Tail[AnyLineT] = Tail(directory / JOURNAL_FILE, line_type)

    @property
    def unreadable_lines(self) -> int:
        """Number of damaged lines so far, which were skipped."""
        return self._tail.unreadable

    def read(self) -> bool:
        """Add the new lines; return True if a conductor works on the search."""
        # The lock is looked at first: a journal read afterwards is at least as new.
        has_conductor = is_conducted(self.directory)
        try:
            new_lines = self._tail.new()
        except OSError:
            return has_conductor  # unreadable for the moment
        if new_lines:
            self.lines = (*self.lines, *new_lines)
        return has_conductor


def state_of_search(directory: Path, journal: BatchJournal | BestJournal, *, has_conductor: bool) -> str:
    """Return the state of a search of either kind: that of its end, else by its journal and its lock.

    The state is `interrupted` if no process conducts the search, and `starting` before its question and first step.
    """
    if journal.ended is not None:
        return journal.ended.state
    if not has_conductor:
        return "starting" if journal.question is None else "interrupted"
    if journal.is_paused:
        return "paused"
    if (directory / PAUSE_FILE).exists():
        return "pausing"
    return "starting" if journal.newest_step is None else "running"

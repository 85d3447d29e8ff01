"""Follow a best-fit search through its journal: a snapshot at each poll, for a screen."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trainfast_runner.records.json_lines import Tail
from trainfast_runner.records.search_directories import JOURNAL_FILE, is_conducted
from trainfast_runner.records.search_states import LIVE_STATES
from trainfast_runner.search.best.best_so_far import BestSoFar
from trainfast_runner.search.best.person_orders import KnobOrder, read_orders
from trainfast_runner.search.journal.best import BestLine
from trainfast_runner.search.journal.lines import state_of_search


@dataclass(frozen=True)
class BestSnapshot:
    """The state of a best-fit search at one moment.

    `state` is starting, running, pausing (it finishes its step first), paused, interrupted (no conductor and no
    recorded end: the same question continues it), answered, nothing_fits, failed or cancelled. `waiting` are orders
    that the conductor has not taken yet.
    """

    directory: Path
    state: str
    so_far: BestSoFar
    waiting: tuple[KnobOrder, ...] = ()

    @property
    def is_live(self) -> bool:
        """True if a conductor works on the search."""
        return self.state in LIVE_STATES


class BestFollower:
    """Reads new journal lines at each `poll`. Not safe to share between threads."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        # msgspec decodes a union by its tag; Tail is typed for one struct.
        self._tail: Tail[BestLine] = Tail(directory / JOURNAL_FILE, BestLine)  # type: ignore[arg-type]
        self._so_far = BestSoFar(())

    def poll(self) -> BestSnapshot:
        """Read the new lines and return a snapshot."""
        # The lock is looked at first: a journal read afterwards is at least as new.
        conducted = is_conducted(self.directory)
        waiting: list[KnobOrder] = []
        try:
            if new := self._tail.new():
                self._so_far = BestSoFar((*self._so_far.lines, *new))
            waiting = read_orders(self.directory)[len(self._so_far.orders) :]
        except OSError:
            pass  # unreadable for the moment
        so_far = self._so_far
        state = state_of_search(
            self.directory,
            end=None if so_far.ended is None else so_far.ended.state,
            is_conducted=conducted,
            is_asked=so_far.question is not None,
            is_paused=so_far.is_paused,
            has_step=so_far.chosen is not None,
        )
        return BestSnapshot(self.directory, state, so_far, tuple(waiting))

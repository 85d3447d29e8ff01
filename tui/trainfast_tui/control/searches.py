"""The searches of both kinds, of which at most one uses the device."""

from __future__ import annotations

from trainfast_runner.records.home import Home
from trainfast_tui.control.batch_control import BatchControl
from trainfast_tui.control.best_control import BestControl
from trainfast_tui.control.messages import Post, TrainingPython
from trainfast_tui.live.search_kind import SearchKind
from trainfast_tui.live.snapshot import Snapshot


class Searches:
    """The controls of both kinds of search."""

    def __init__(self, home: Home, post: Post, python: TrainingPython) -> None:
        self.batch = BatchControl(home, post, python)
        self.best = BestControl(home, post, python)

    def of(self, kind: SearchKind) -> BestControl | BatchControl:
        """Return the control of this kind of search."""
        return self.best if kind is SearchKind.BEST else self.batch

    @property
    def running_kind(self) -> SearchKind | None:
        """The kind of the search that uses the device; None without one."""
        return next((kind for kind in SearchKind if self.of(kind).is_active), None)

    def note_snapshot(self, snapshot: Snapshot) -> None:
        """Note the followed search of each kind."""
        self.batch.note_seen(snapshot.batch_search)
        self.best.note_seen(snapshot.best_search)

"""The searches of both kinds, of which at most one uses the device."""

from __future__ import annotations

from trainfast_runner.records.home import Home
from trainfast_tui.control.best_control import BestControl
from trainfast_tui.control.messages import Notified, Post, SearchEnded
from trainfast_tui.control.search_control import BatchControl, SearchControl, SearchSnapshotT
from trainfast_tui.live.snapshot import Snapshot
from trainfast_tui.text.search_kind import SearchKind


class Searches:
    """The controls of both kinds of search. `python` trains, None for this Python."""

    def __init__(self, home: Home, post: Post, python: str | None) -> None:
        self.batch = BatchControl(home, post, python)
        self.best = BestControl(home, post, python)
        self._post = post

    def of(self, kind: SearchKind) -> BestControl | BatchControl:
        """Return the control of this kind of search."""
        return self.best if kind is SearchKind.BEST else self.batch

    @property
    def running(self) -> SearchKind | None:
        """The kind of the search that uses the device; None without one."""
        return next((kind for kind in SearchKind if self.of(kind).is_active), None)

    def note_snapshot(self, snapshot: Snapshot) -> None:
        """Note the followed search of each kind, and post that one is live or has ended."""
        self._note(self.batch, snapshot.batch_search)
        self._note(self.best, snapshot.best_search)

    def _note(self, control: SearchControl[SearchSnapshotT], search: SearchSnapshotT | None) -> None:
        if control.is_started_elsewhere(search):
            self._post(Notified(f"A {control.KIND.label} search is live; {control.KIND.key} shows it."))
        if search is not None and control.has_ended_since(search):
            self._post(SearchEnded(control.describe(search), control.KIND))
        control.note_seen(search)

"""The reader's view of the run, the search and the machine at one moment: frozen, read without locks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, TypeVar

import msgspec

from trainfast_tui.text.keys import key_of

if TYPE_CHECKING:
    from trainfast_runner.machine.processes import ProcessRow
    from trainfast_runner.records.run_lines import Event
    from trainfast_runner.records.tick import Tick
    from trainfast_runner.running.follower import RunSnapshot
    from trainfast_runner.search.batch_journal import BatchSnapshot
    from trainfast_runner.search.best.answer import BestSoFar

    SearchSnapshot = BatchSnapshot | BestSoFar

SearchSnapshotT = TypeVar("SearchSnapshotT", bound="BatchSnapshot | BestSoFar")
"""The snapshots of both kinds of search; each has a `directory`, a `state`, and `is_live` while a conductor works."""


class Snapshot(msgspec.Struct, frozen=True):
    """The followed run and the machine at one moment."""

    taken_ns: int
    """CLOCK_MONOTONIC."""
    run: RunSnapshot | None
    """None until a run is found."""
    ticks: tuple[Tick, ...]
    """The newest `reader.TICKS_KEPT` samples of the machine, taken by the app while no run samples it; newest last."""
    has_read_home: bool
    """True once the home has been searched: without a run this is then a first start."""
    batch_search: BatchSnapshot | None = None
    """The followed batch search, which may have ended."""
    best_search: BestSoFar | None = None
    """The followed best-fit search, which may have ended."""
    trouble: str | None = None
    """The reason the run, a search or the list of runs cannot be read, in one line."""
    xids: tuple[Event, ...] = ()
    """Xid errors that the app's own sampler received, while no run samples the machine."""
    processes: tuple[ProcessRow, ...] | None = None
    """The processes that use the machine; None while no screen shows them."""
    other_live_run_id: str | None = None
    """Id of the newest live run that is not shown, a search's trial for instance."""

    @property
    def live_run(self) -> RunSnapshot | None:
        """The run while it is live."""
        return self.run if self.run is not None and self.run.is_live else None

    @property
    def tick(self) -> Tick | None:
        """The newest sample of the machine, by the run's sampler or our own."""
        own_tick = self.ticks[-1] if self.ticks else None
        run_tick = self.live_run.ticks[-1] if self.live_run is not None and self.live_run.ticks else None
        if own_tick is None or run_tick is None:
            return own_tick or run_tick
        return run_tick if run_tick.t_ns >= own_tick.t_ns else own_tick

    @property
    def cpu_percent(self) -> float | None:
        """The newest known share of all processors in percent; a sampler's first tick has none."""
        run_ticks = self.run.ticks[-2:] if self.run is not None else ()
        newest = sorted((*self.ticks[-2:], *run_ticks), key=lambda tick: tick.t_ns, reverse=True)
        return next((tick.host.cpu_percent for tick in newest if tick.host.cpu_percent is not None), None)

    @property
    def machine_ticks(self) -> Sequence[Tick]:
        """All samples of the machine: while a run samples it, the run's follow our own."""
        run = self.live_run
        if run is None or not run.ticks:
            return self.ticks
        before = bisect_left(self.ticks, run.ticks[0].t_ns, key=lambda tick: tick.t_ns)
        return (*self.ticks[:before], *run.ticks)

    @property
    def machine_xids(self) -> Sequence[Event]:
        """The Xid errors that our own sampler and a live run's received."""
        run_events = self.live_run.events if self.live_run is not None else ()
        return (*self.xids, *(event for event in run_events if event.kind == "xid"))


def used_uuids(run: RunSnapshot | None) -> frozenset[str]:
    """Return the UUIDs of the GPUs the run uses or watches."""
    if run is None or run.run_file is None:
        return frozenset()
    return frozenset((*run.run_file.device_uuids, *run.run_file.watch_uuids))


class SearchKind(StrEnum):
    """A kind of search; in `text.keys` its value is the action that opens its screen, and the scope of that screen."""

    BATCH = "batch"
    BEST = "best"

    @property
    def label(self) -> str:
        """The name in front of "search"."""
        return "batch" if self is SearchKind.BATCH else "best-fit"

    @property
    def key(self) -> str:
        """The key of the main screen that opens the search."""
        return key_of("main", self.value)

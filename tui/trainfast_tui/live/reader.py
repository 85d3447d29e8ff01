"""The reader thread: follows a run's files, samples the machine, and posts a snapshot twice a second."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from trainfast_runner.errors import UserError
from trainfast_runner.records.home import Home
from trainfast_tui.live.new_runs import NewRuns
from trainfast_tui.live.snapshot import SeenSearch, Snapshot
from trainfast_tui.text.search_kind import SearchKind

if TYPE_CHECKING:
    from trainfast_runner.machine.processes.listing import ProcessList, ProcessRow
    from trainfast_runner.machine.telemetry.sampler import Sampler
    from trainfast_runner.records.run_lines import Event
    from trainfast_runner.records.tick import Tick
    from trainfast_runner.running.follower import Follower, RunSnapshot
    from trainfast_runner.search.batch.batch_follower import BatchFollower
    from trainfast_runner.search.best.best_follower import BestFollower

PERIOD_S = 0.5
SAMPLE_PERIOD_S = 1.0
WATCHED_PERIOD_S = 0.5
"""While a screen shows the processes."""
TICKS_KEPT = 3600
XIDS_KEPT = 100
LOOK_AGAIN_S = 2.0
"""Seconds between two looks for a search that was started elsewhere, while the followed one does nothing."""
FRESH_NS = 4_000_000_000
"""The machine is not sampled here while a live run's own samples are at most this old."""


class _FollowedDirectory:
    """The directory to follow: the chosen one, or the one that `find` returns once. Safe from any thread."""

    def __init__(self, find: Callable[[], Path | None]) -> None:
        self._find = find
        self._lock = threading.Lock()
        """Held while both fields below change, so that `find` never replaces a directory that was chosen meanwhile."""
        self._directory: Path | None = None
        self.is_known = False

    def follow(self, directory: Path | None) -> None:
        """Follow this directory from now on, or none."""
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
        """The directory so far, without looking for one."""
        return self._directory

    def find_or_get(self) -> Path | None:
        """The chosen directory, or else the one that `find` returns. Raises the errors of `find`."""
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


SeenT = TypeVar("SeenT", bound=SeenSearch, covariant=True)


class JournalFollower(Protocol[SeenT]):
    """Follows the journal of one search."""

    directory: Path

    def poll(self) -> SeenT:
        """Read the new lines and return a snapshot."""
        ...


class FollowedSearch(Generic[SeenT]):
    """The followed search of one kind: the newest of the home, or the chosen one."""

    def __init__(self, newest: Callable[[], Path | None], follow: Callable[[Path], JournalFollower[SeenT]]) -> None:
        self.followed = _FollowedDirectory(newest)
        self._newest = newest
        self._follow = follow
        self._follower: JournalFollower[SeenT] | None = None
        self._looked = time.monotonic()

    def poll(self) -> SeenT | None:
        """Return a snapshot of the search; None without one."""
        directory = self.followed.find_or_get()
        if directory is None:
            self._follower = None
        elif self._follower is None or self._follower.directory != directory:
            self._follower = self._follow(directory)
        seen = None if self._follower is None else self._follower.poll()
        return seen if seen is not None and seen.is_live else self._elsewhere(directory) or seen

    def _elsewhere(self, directory: Path | None) -> SeenT | None:
        """Follow a live search that was started elsewhere, at another terminal; None without one."""
        if time.monotonic() - self._looked < LOOK_AGAIN_S:
            return None
        self._looked = time.monotonic()
        newest = self._newest()
        if newest is None or newest == directory:
            return None
        follower = self._follow(newest)
        seen = follower.poll()
        if not seen.is_live or not self.followed.replace(directory, newest):
            return None
        self._follower = follower
        return seen


class Reader(threading.Thread):
    """Calls `post` with a `Snapshot` every `period_s` seconds; follows the newest run of the home at first."""

    def __init__(
        self,
        home: Home,
        post: Callable[[Snapshot], object],
        failed: Callable[[BaseException], object] | None = None,
    ) -> None:
        """`failed` gets the error that ends the thread."""
        super().__init__(name="trainfast-reader", daemon=True)
        self.period_s = PERIOD_S
        """Seconds between two snapshots; may be changed at any time."""
        self._home = home
        self._post = post
        self._failed = failed
        self._run_directory = _FollowedDirectory(self._newest_run)
        self._follower: Follower | None = None
        self._batch = FollowedSearch(self._newest_batch, _batch_follower)
        self._best = FollowedSearch(self._newest_best, _best_follower)
        self._sampler: Sampler | None = None
        self._ticks: deque[Tick] = deque(maxlen=TICKS_KEPT)
        self._xids: deque[Event] = deque(maxlen=XIDS_KEPT)
        self._with_processes = False
        self._processes: ProcessList | None = None
        self._new_runs = NewRuns(home)
        self._stopping = False
        self._wake = threading.Event()

    def follow(self, directory: Path | None) -> None:
        """Follow this run from now on, or none. Safe from any thread."""
        self._run_directory.follow(directory)
        self._wake.set()

    @property
    def followed(self) -> Path | None:
        """The run to be shown."""
        return self._run_directory.directory

    def follow_search(self, directory: Path, kind: SearchKind) -> None:
        """Follow this search from now on, in place of another of its kind. Safe from any thread."""
        (self._best if kind is SearchKind.BEST else self._batch).followed.follow(directory)
        self._wake.set()

    def look_at_processes(self, on: bool) -> None:
        """Put the processes that use the machine into the snapshots, or leave them out. Safe from any thread."""
        self._with_processes = on
        self._wake.set()

    def stop(self, timeout_s: float = 1.0) -> None:
        """End the thread, waiting at most `timeout_s`."""
        self._stopping = True
        self._wake.set()
        if self.ident is not None:
            self.join(timeout_s)

    def run(self) -> None:
        try:
            self._read_loop()
        except Exception as error:
            if self._failed is None:
                raise
            # Else the last snapshot would stay on the screen as if it were the newest.
            self._failed(error)
        finally:
            if self._sampler is not None:
                self._sampler.stop(timeout_s=0.2)

    def _read_loop(self) -> None:
        while not self._stopping:
            began = time.monotonic()
            self._post(self._snapshot())
            self._wake.wait(max(0.05, self.period_s - (time.monotonic() - began)))
            self._wake.clear()

    def _snapshot(self) -> Snapshot:
        trouble: str | None = None
        run: RunSnapshot | None = None
        batch = best = None
        elsewhere: str | None = None
        try:
            run = self._poll_run()
            batch = self._batch.poll()
            best = self._best.poll()
            elsewhere = self._new_runs.newest(self.followed)
            if elsewhere is not None and run is None and self.followed is None:
                self._run_directory.follow(self._home.directory(elsewhere))
        except UserError as error:
            trouble = error.line()
        except OSError as error:
            trouble = f"cannot read the run: {error}"
        self._sample(run)
        snapshot = Snapshot(
            taken_ns=time.monotonic_ns(),
            run=run,
            ticks=tuple(self._ticks),
            xids=tuple(self._xids),
            home_read=self._run_directory.is_known,
            batch_search=batch,
            best_search=best,
            trouble=trouble,
            started_elsewhere=elsewhere,
        )
        return replace(snapshot, processes=self._processes_now(snapshot)) if self._with_processes else snapshot

    def _note_tick(self, tick: Tick) -> None:
        is_first = not self._ticks
        self._ticks.append(tick)
        if is_first:
            # Show the devices at once: after late frames the next repaint may be seconds away.
            self._wake.set()

    def _note_xid(self, t_ns: int, index: int, code: int) -> None:
        from trainfast_runner.machine.telemetry.xid import xid_words
        from trainfast_runner.records.run_lines import Event

        self._xids.append(Event(t_ns=t_ns, kind="xid", device=index, detail=xid_words(code)))

    def _processes_now(self, snapshot: Snapshot) -> tuple[ProcessRow, ...]:
        if self._processes is None:
            from trainfast_runner.machine.processes.listing import ProcessList

            self._processes = ProcessList()
        return self._processes.read(snapshot.tick.devices if snapshot.tick is not None else ())

    def _newest_run(self) -> Path | None:
        from trainfast_runner.running.follower import newest_run

        return newest_run(self._home)

    def _newest_batch(self) -> Path | None:
        from trainfast_runner.search.searches import newest_search

        return newest_search(self._home)

    def _newest_best(self) -> Path | None:
        from trainfast_runner.search.searches import BEST_TAG, newest_search

        return newest_search(self._home, BEST_TAG)

    def _poll_run(self) -> RunSnapshot | None:
        directory = self._run_directory.find_or_get()
        if directory is not None and not directory.exists():
            self._run_directory.forget(directory)
            directory = None
        if directory is None:
            self._follower = None
            return None
        if self._follower is None or self._follower.directory != directory:
            from trainfast_runner.running.follower import Follower

            self._follower = Follower(directory)
        return self._follower.poll()

    def _sample(self, run: RunSnapshot | None) -> None:
        """Sample the machine here unless the run's supervisor does."""
        newest_ns = run.ticks[-1].t_ns if run is not None and run.is_live and run.ticks else 0
        supplied = 0 <= time.monotonic_ns() - newest_ns < FRESH_NS
        if supplied and self._sampler is not None:
            self._sampler.stop(timeout_s=0.2)
            self._sampler = None
        elif not supplied and self._sampler is None:
            from trainfast_runner.machine.telemetry.sampler import Sampler

            self._sampler = Sampler(self._note_tick, on_xid=self._note_xid)
            self._sampler.start()
        if self._sampler is not None:
            self._sampler.ask_period(WATCHED_PERIOD_S if self._with_processes else SAMPLE_PERIOD_S)


def _batch_follower(directory: Path) -> BatchFollower:
    from trainfast_runner.search.batch.batch_follower import BatchFollower

    return BatchFollower(directory)


def _best_follower(directory: Path) -> BestFollower:
    from trainfast_runner.search.best.best_follower import BestFollower

    return BestFollower(directory)

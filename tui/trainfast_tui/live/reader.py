"""The reader thread: follows a run's files, samples the machine, and posts a snapshot twice a second."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from msgspec.structs import replace

from trainfast_runner.errors import UserError
from trainfast_runner.records.home import Home
from trainfast_runner.records.run_directory import RUN_FILE, is_unfinished, read_run_file
from trainfast_tui.live.snapshot import SearchKind, SearchSnapshot, SearchSnapshotT, Snapshot

if TYPE_CHECKING:
    from trainfast_runner.machine.process_list import ProcessList, ProcessRow
    from trainfast_runner.machine.telemetry.sampler import Sampler
    from trainfast_runner.records.run_lines import Event
    from trainfast_runner.records.tick import Tick
    from trainfast_runner.running.follower import Follower, RunSnapshot
    from trainfast_runner.search.batch_journal import BatchFollower
    from trainfast_runner.search.best.answer import BestFollower


ReadT = TypeVar("ReadT")
SAMPLE_PERIOD_S = 1.0
"""Seconds between two samples of the machine while no run samples it."""
WATCHED_PERIOD_S = 0.5
"""Seconds between two samples of the machine while a screen shows the processes."""
MIN_PAUSE_S = 0.05
"""Seconds that the thread rests between two snapshots, however long one took."""
STOP_SAMPLER_S = 0.2
"""Seconds that the sampler has to end."""
TICKS_KEPT = 3600
XIDS_KEPT = 100
MAX_TICK_AGE_NS = 4_000_000_000
"""Chosen, not measured: the machine is not sampled here while a live run's own samples are at most this old."""


class Reader(threading.Thread):
    """Calls `post` with a `Snapshot` every `period_s` seconds; follows the newest run of the home at first."""

    def __init__(
        self,
        home: Home,
        post: Callable[[Snapshot], object],
        on_failure: Callable[[BaseException], object] | None = None,
    ) -> None:
        """`on_failure` gets the error that ends the thread."""
        super().__init__(name="trainfast-reader", daemon=True)
        self.period_s = SHORTEST_PERIOD_S
        """Seconds between two snapshots; may be changed at any time."""
        self._home = home
        self._post = post
        self._on_failure = on_failure
        self._followed_run = FollowedRun(home)
        self._batch_search = FollowedSearch(home, SearchKind.BATCH, open_batch_journal)
        self._best_search = FollowedSearch(home, SearchKind.BEST, open_best_journal)
        self._sampler: Sampler | None = None
        self._ticks: deque[Tick] = deque(maxlen=TICKS_KEPT)
        self._xids: deque[Event] = deque(maxlen=XIDS_KEPT)
        self._trouble: str | None = None
        """The reason something could not be read for the present snapshot."""
        self._looks_at_processes = False
        self._processes: ProcessList | None = None
        self._other_runs = OtherRuns(home)
        self._stopping = False
        self._wake = threading.Event()

    def follow(self, directory: Path) -> None:
        """Follow this run from now on. Safe from any thread."""
        self._followed_run.follow(directory)
        self._wake.set()

    @property
    def followed(self) -> Path | None:
        """The run to be shown."""
        return self._followed_run.directory

    def follow_search(self, directory: Path, kind: SearchKind) -> None:
        """Follow this search from now on, in place of another of its kind. Safe from any thread."""
        (self._best_search if kind is SearchKind.BEST else self._batch_search).follow(directory)
        self._wake.set()

    def look_at_processes(self, is_wanted: bool) -> None:
        """Put the processes that use the machine into the snapshots, or leave them out. Safe from any thread."""
        self._looks_at_processes = is_wanted
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
            if self._on_failure is None:
                raise
            # Else the last snapshot would stay on the screen as if it were the newest.
            self._on_failure(error)
        finally:
            if self._sampler is not None:
                self._sampler.stop(timeout_s=STOP_SAMPLER_S)

    def _read_loop(self) -> None:
        while not self._stopping:
            began = time.monotonic()
            self._post(self._snapshot())
            self._wake.wait(max(MIN_PAUSE_S, self.period_s - (time.monotonic() - began)))
            self._wake.clear()

    def _snapshot(self) -> Snapshot:
        self._trouble = None
        run = self._read("the run", self._followed_run.poll, None)
        # A search that cannot be read keeps its last state: nothing may start beside it.
        batch_search = self._read("the batch search", self._batch_search.poll, self._batch_search.newest)
        best_search = self._read("the best-fit search", self._best_search.poll, self._best_search.newest)
        self._read("the list of runs", lambda: self._other_runs.look(self.followed), None)
        if run is None and self.followed is None and (started := self._other_runs.newest_directory()) is not None:
            self._followed_run.follow(started)  # the next snapshot shows it
        self._update_sampler(run)
        snapshot = Snapshot(
            taken_ns=time.monotonic_ns(),
            run=run,
            ticks=tuple(self._ticks),
            xids=tuple(self._xids),
            has_read_home=self._followed_run.is_known,
            batch_search=batch_search,
            best_search=best_search,
            trouble=self._trouble,
            other_live_run_id=self._other_runs.live_id,
        )
        return replace(snapshot, processes=self._read_processes(snapshot)) if self._looks_at_processes else snapshot

    def _read(self, subject: str, read: Callable[[], ReadT], instead: ReadT) -> ReadT:
        """Return the result of `read`; if it fails, `instead`, with the reason in `_trouble`."""
        try:
            return read()
        except UserError as error:
            self._trouble = error.line_without_option()
        except OSError as error:
            self._trouble = f"cannot read {subject}: {error}"
        return instead

    def _add_tick(self, tick: Tick) -> None:
        is_first = not self._ticks
        self._ticks.append(tick)
        if is_first:
            # Show the devices at once: after late frames the next repaint may be seconds away.
            self._wake.set()

    def _add_xid(self, t_ns: int, index: int, code: int) -> None:
        from trainfast_runner.machine.telemetry.nvml import xid_text
        from trainfast_runner.records.run_lines import Event

        self._xids.append(Event(t_ns=t_ns, kind="xid", device=index, detail=xid_text(code)))

    def _read_processes(self, snapshot: Snapshot) -> tuple[ProcessRow, ...]:
        if self._processes is None:
            from trainfast_runner.machine.process_list import ProcessList

            self._processes = ProcessList()
        return self._processes.read(snapshot.tick.devices if snapshot.tick is not None else ())

    def _update_sampler(self, run: RunSnapshot | None) -> None:
        """Keep a sampler of our own while no supervisor of a live run samples the machine."""
        newest_ns = run.ticks[-1].t_ns if run is not None and run.is_live and run.ticks else 0
        run_samples = 0 <= time.monotonic_ns() - newest_ns < MAX_TICK_AGE_NS
        if run_samples and self._sampler is not None:
            self._sampler.stop(timeout_s=STOP_SAMPLER_S)
            self._sampler = None
        elif not run_samples and self._sampler is None:
            from trainfast_runner.machine.telemetry.sampler import Sampler

            self._sampler = Sampler(self._add_tick, on_xid=self._add_xid)
            self._sampler.start()
        if self._sampler is not None:
            self._sampler.ask_period(WATCHED_PERIOD_S if self._looks_at_processes else SAMPLE_PERIOD_S)


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
    from trainfast_runner.search.batch_journal import BatchFollower

    return BatchFollower(directory)


def open_best_journal(directory: Path) -> BestFollower:
    """Return a follower of the journal of this best-fit search."""
    from trainfast_runner.search.best.answer import BestFollower

    return BestFollower(directory)


def _newest_search(home: Home, kind: SearchKind) -> Path | None:
    from trainfast_runner.search.searches import BATCH_KIND, BEST_KIND, newest_search

    return newest_search(home, BEST_KIND if kind is SearchKind.BEST else BATCH_KIND)


def _newest_run(home: Home) -> Path | None:
    from trainfast_runner.running.follower import newest_run

    return newest_run(home)


class OtherRuns:
    """Finds live runs other than the one on the screen.

    Every `look` tries the lock of each unended run; it lists the runs only the first time, and after their folder has
    changed.
    """

    def __init__(self, home: Home) -> None:
        self.live_id: str | None = None
        """Id of the newest live run that is not shown, as of the last look; None if there is none."""
        self._home = home
        self._changed_ns: int | None = None
        """The time at which the folder of runs had changed last; None before the first look."""
        self._listed_ids: frozenset[str] = frozenset()
        """Ids of all runs at the last look."""
        self._unended_ids: list[str] = []
        """Ids of the runs that have not ended as far as is known, newest first."""

    def look(self, shown_directory: Path | None) -> None:
        """Look for live runs other than that of `shown_directory`."""
        self._look_for_new()
        unended_ids: list[str] = []
        self.live_id = None
        for run_id in self._unended_ids:
            directory = self._home.directory(run_id)
            # Looked for before the lock is tried: a launch takes the lock before it writes `run.json`.
            is_launched = (directory / RUN_FILE).exists()
            is_live = directory != shown_directory and is_unfinished(directory)
            if is_live or not is_launched or directory == shown_directory:
                unended_ids.append(run_id)
            if is_live and self.live_id is None:
                self.live_id = run_id
        self._unended_ids = unended_ids

    def newest_directory(self) -> Path | None:
        """Return the directory of the newest live run that was not started by a search; None without one."""
        for run_id in self._unended_ids:
            directory = self._home.directory(run_id)
            if (run_file := read_run_file(directory)) is not None and run_file.role is None:
                return directory
        return None

    def _look_for_new(self) -> None:
        try:
            changed_ns = self._home.runs.stat().st_mtime_ns
        except OSError:
            changed_ns = 0  # there is no run yet
        if changed_ns == self._changed_ns:
            return
        run_ids = self._home.run_ids()
        # Set after the look, so that an unreadable home is reported each time.
        self._changed_ns = changed_ns
        new_ids = set(run_ids) - self._listed_ids
        self._unended_ids = [run_id for run_id in reversed(run_ids) if run_id in new_ids or run_id in self._unended_ids]
        self._listed_ids = frozenset(run_ids)


SHORTEST_PERIOD_S = 0.5
PERIOD_BESIDE_TRAINING_S = 1.0
"""The period while a run trains on this CPU: a frame takes milliseconds of a core that all its threads wait for."""
LONGEST_PERIOD_S = 4.0
LATE_AFTER_S = 0.4
"""A snapshot that waited longer than this for the event loop was delayed by output or by a busy CPU."""
MAX_UNWRITTEN_TEXTS = 3
"""More unwritten texts than this mean a slow terminal: a frame is one text, or three with synchronized output."""
FRAMES_TO_SPEED_UP = 6
"""Frames in time before the period is halved."""


class Pacer:
    """Double the period when frames are late; halve it after a calm time."""

    def __init__(self) -> None:
        self.period_s = SHORTEST_PERIOD_S
        self._calm = 0

    def note(self, late_s: float, unwritten_texts: int = 0, *, trains_on_cpu: bool = False) -> float:
        """Count one snapshot's delay and the texts still unwritten; return the period from now on."""
        if late_s > LATE_AFTER_S or unwritten_texts > MAX_UNWRITTEN_TEXTS:
            self.period_s = min(LONGEST_PERIOD_S, self.period_s * 2)
            self._calm = 0
        else:
            self._calm += 1
            if self._calm >= FRAMES_TO_SPEED_UP and self.period_s > SHORTEST_PERIOD_S:
                self.period_s = max(SHORTEST_PERIOD_S, self.period_s / 2)
                self._calm = 0
        return max(self.period_s, PERIOD_BESIDE_TRAINING_S) if trains_on_cpu else self.period_s

    @property
    def words(self) -> str:
        """The footer's notice while frames are late; empty otherwise."""
        return (
            f"the screen is behind: repainting every {self.period_s:g} s" if self.period_s > SHORTEST_PERIOD_S else ""
        )

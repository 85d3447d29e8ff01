"""The reader thread: follows a run's files, samples the machine, and posts a snapshot twice a second."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from msgspec.structs import replace

from trainfast_runner.errors import UserError
from trainfast_runner.records.home import Home
from trainfast_runner.records.run_directory import is_alive, is_listed, is_unfinished, read_run_file
from trainfast_tui.live.snapshot import SearchKind, SearchSnapshotT, Snapshot

if TYPE_CHECKING:
    from trainfast_runner.machine.processes import ProcessList, ProcessRow
    from trainfast_runner.machine.telemetry.sampler import Sampler
    from trainfast_runner.records.run_lines import Event
    from trainfast_runner.records.tick import Tick
    from trainfast_runner.running.follower import RunSnapshot
    from trainfast_runner.search.batch_journal import BatchSnapshot
    from trainfast_runner.search.best.answer import BestSoFar


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
        self._followed_run = Followed(partial(_newest_run, home), _open_run)
        self._batch_search: FollowedSearch[BatchSnapshot] = FollowedSearch(home, SearchKind.BATCH)
        self._best_search: FollowedSearch[BestSoFar] = FollowedSearch(home, SearchKind.BEST)
        self._sampler: Sampler | None = None
        self._ticks: deque[Tick] = deque(maxlen=TICKS_KEPT)
        self._xids: deque[Event] = deque(maxlen=XIDS_KEPT)
        self._trouble: str | None = None
        """The reason something could not be read for the present snapshot."""
        self._looks_at_processes = False
        self._processes: ProcessList | None = None
        self._live_runs = LiveRuns(home)
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
        live_runs: list[Path] = self._read("the list of runs", self._live_runs.directories, [])
        if run is None and self.followed is None and (started := _newest_of_no_search(live_runs)) is not None:
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
            other_live_run_id=next((live.name for live in live_runs if live != self.followed), None),
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
            from trainfast_runner.machine.processes import ProcessList

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
            self._sampler.period_s = WATCHED_PERIOD_S if self._looks_at_processes else SAMPLE_PERIOD_S


LOOK_AGAIN_S = 2.0
"""Seconds between two looks for a search that was started elsewhere, while the followed one does nothing."""
FollowedT = TypeVar("FollowedT")
Poll = Callable[[], FollowedT]


class Followed(Generic[FollowedT]):
    """The followed run or search: the one that was chosen, or else the result of `find`, also after a deletion.

    `open_records` returns a function that reads the new lines of its records and returns a snapshot.
    """

    def __init__(self, find: Callable[[], Path | None], open_records: Callable[[Path], Poll[FollowedT]]) -> None:
        self._find, self._open_records = find, open_records
        self._lock = threading.Lock()
        """Held while both fields below change, so that `find` never replaces a directory that was chosen meanwhile."""
        self.directory: Path | None = None
        """The run or search that is followed; None if none is known yet."""
        self.is_known = False
        """True once it was chosen or looked for."""
        self._poll: Poll[FollowedT] | None = None
        self._polled: Path | None = None
        self.newest: FollowedT | None = None
        """The newest snapshot; None without a run or search."""

    def follow(self, directory: Path) -> None:
        """Follow this directory from now on. Safe from any thread."""
        with self._lock:
            self.directory, self.is_known = directory, True

    def poll(self) -> FollowedT | None:
        """Return a snapshot; None without a run or search. Raises the errors of `find` and of the follower."""
        directory = self.directory
        if not self.is_known or (directory is not None and not directory.exists()):
            directory = self._replace(directory, self._find())
        if directory != self._polled:
            self._poll = None if directory is None else self._open_records(directory)
            self._polled = directory
        self.newest = None if self._poll is None else self._poll()
        return self.newest

    def _replace(self, before: Path | None, after: Path | None) -> Path | None:
        """Follow `after` unless another than `before` was chosen meanwhile; return the followed directory."""
        with self._lock:
            if self.directory == before:
                self.directory, self.is_known = after, True
            return self.directory


class FollowedSearch(Followed[SearchSnapshotT]):
    """The followed search of one kind; a live one of another terminal takes the place of an idle one."""

    def __init__(self, home: Home, kind: SearchKind) -> None:
        super().__init__(partial(_newest_search, home, kind), partial(_open_search, kind))
        self._looked_elsewhere_s = time.monotonic()

    def poll(self) -> SearchSnapshotT | None:
        """Return a snapshot of the search; None without one."""
        search = super().poll()
        if (search is not None and search.is_live) or time.monotonic() - self._looked_elsewhere_s < LOOK_AGAIN_S:
            return search
        directory, newest = self.directory, self._find()
        # Set after the look, so that an unreadable home is reported each time.
        self._looked_elsewhere_s = time.monotonic()
        if newest is None or newest == directory or not self._open_records(newest)().is_live:
            return search
        self._replace(directory, newest)
        return super().poll()


def _open_run(directory: Path) -> Poll[RunSnapshot]:
    from trainfast_runner.running.follower import Follower

    return Follower(directory).poll


def _open_search(kind: SearchKind, directory: Path) -> Poll[Any]:
    from trainfast_runner.search.batch_journal import BatchSnapshot
    from trainfast_runner.search.journal import JournalFollower

    if kind is SearchKind.BATCH:
        return JournalFollower(directory, BatchSnapshot).poll
    from trainfast_runner.search.best.answer import BestSoFar  # with numpy, which takes a while

    return JournalFollower(directory, BestSoFar).poll


def _newest_search(home: Home, kind: SearchKind) -> Path | None:
    from trainfast_runner.search.searches import BATCH_KIND, BEST_KIND, newest_search

    return newest_search(home, BEST_KIND if kind is SearchKind.BEST else BATCH_KIND)


def _newest_run(home: Home) -> Path | None:
    """Return the newest run; where a home has only runs of searches, the newest of these that has ended."""
    from trainfast_runner.running.follower import newest_run

    if (newest := newest_run(home)) is not None:
        return newest
    directories = map(home.directory, home.newest_run_ids(RUNS_LOOKED_AT))
    return next((directory for directory in directories if is_listed(directory) and not is_alive(directory)), None)


def _newest_of_no_search(directories: Iterable[Path]) -> Path | None:
    runs = ((directory, read_run_file(directory)) for directory in directories)
    return next((directory for directory, run in runs if run is not None and run.role is None), None)


RUNS_LOOKED_AT = 64
"""Chosen, not measured: of the newest runs of a home so many are looked at, in less than a millisecond."""


class LiveRuns:
    """Finds the live runs: of all runs at the first look, then of those that were live and of the newest ones."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._changed_ns: int | None = None
        """The time at which the folder of runs had changed last; None before the first look."""
        self._run_ids: list[str] = []
        """The runs to look at, the newest first."""
        self._live_ids: frozenset[str] = frozenset()

    def directories(self) -> list[Path]:
        """Return the directories of the live runs, the newest first. Raises UserError for an unreadable home."""
        try:
            changed_ns = self._home.runs.stat().st_mtime_ns
        except OSError:
            changed_ns = 0  # there is no run yet
        if changed_ns != self._changed_ns:
            run_ids = self._home.run_ids()[::-1]
            self._run_ids = run_ids if self._changed_ns is None else self._worth_a_look(run_ids)
            # Set after the look, so that an unreadable home is reported each time.
            self._changed_ns = changed_ns
        live = list(filter(is_unfinished, map(self._home.directory, self._run_ids)))
        self._live_ids = frozenset(directory.name for directory in live)
        self._run_ids = self._worth_a_look(self._run_ids)
        return live

    def _worth_a_look(self, run_ids: Sequence[str]) -> list[str]:
        return [*run_ids[:RUNS_LOOKED_AT], *(run_id for run_id in run_ids[RUNS_LOOKED_AT:] if run_id in self._live_ids)]


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
        is_behind = self.period_s > SHORTEST_PERIOD_S
        return f"the screen is behind: repainting every {self.period_s:g} s" if is_behind else ""

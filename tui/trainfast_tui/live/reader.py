"""The reader thread: follows a run's files, samples the machine, and posts a snapshot twice a second."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from msgspec.structs import replace

from trainfast_runner.errors import UserError
from trainfast_runner.records.home import Home
from trainfast_tui.live.followed import FollowedRun, FollowedSearch, open_batch_journal, open_best_journal
from trainfast_tui.live.other_runs import OtherRuns
from trainfast_tui.live.pacing import SHORTEST_PERIOD_S
from trainfast_tui.live.search_kind import SearchKind
from trainfast_tui.live.snapshot import Snapshot

if TYPE_CHECKING:
    from trainfast_runner.machine.process_list import ProcessList, ProcessRow
    from trainfast_runner.machine.telemetry.sampler import Sampler
    from trainfast_runner.records.run_lines import Event
    from trainfast_runner.records.tick import Tick
    from trainfast_runner.running.follower import RunSnapshot

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
        other_run_id = self._other_runs.started_elsewhere_id
        if other_run_id is not None and run is None and self.followed is None:
            self._followed_run.follow(self._home.directory(other_run_id))
            other_run_id = None  # the next snapshot shows it
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
            started_elsewhere_id=other_run_id,
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
        from trainfast_runner.machine.telemetry.calls import xid_text
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

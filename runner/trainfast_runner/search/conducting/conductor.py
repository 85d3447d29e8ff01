"""Work common to the conductors of a batch search and of a best-fit search: one journal, one run at a time.

A conductor holds its search's lock, takes the steps that the search decides, and ends every process it started.
"""

from __future__ import annotations

import dataclasses
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Generic, TypeVar, cast

import msgspec

from trainfast_runner.errors import UserError
from trainfast_runner.machine.processes import boot_id, identify
from trainfast_runner.records.home import Home
from trainfast_runner.records.search_directories import PAUSE_FILE, conductor_lock
from trainfast_runner.running.planning import RunPlan
from trainfast_runner.search.conducting.run_ends import Cancelled
from trainfast_runner.search.conducting.search_runs import SearchRuns
from trainfast_runner.search.conducting.waiting import IDLE_POLL_S, wait_until
from trainfast_runner.search.journal.lines import (
    CANCELLED_REASON,
    Conducted,
    EndState,
    JournalWriter,
    Line,
    Paused,
    Resumed,
    SearchEnded,
    worked_seconds,
)
from trainfast_runner.search.options import SearchOptions

LineT = TypeVar("LineT")
EndedT = TypeVar("EndedT", bound=SearchEnded)


@dataclasses.dataclass(frozen=True)
class SearchCaller(Generic[LineT]):
    """Callbacks and start time that the caller of a search gives."""

    on_line: Callable[[LineT], None] = lambda line: None
    """Called with every new line of the journal."""
    is_cancelled: Callable[[], bool] = lambda: False
    """Returns True to end the search."""
    began_ns: int | None = None
    """CLOCK_MONOTONIC from which the search's time counts; None for the start of the conductor."""


class AlreadyConducted(UserError):
    """Another process conducts the search."""


class Conductor(ABC, Generic[LineT, EndedT]):
    """One process's work on a search, until the search ends or is cancelled.

    A subclass takes the steps: it starts runs through `_runs`, and records with `_write` in `_lines`, the journal so
    far.
    """

    def __init__(
        self,
        directory: Path,
        plan: RunPlan,
        home: Home,
        lines: list[LineT],
        options: SearchOptions,
        caller: SearchCaller[LineT],
    ) -> None:
        self._directory, self._home = directory, home
        self._options, self._caller = options, caller
        self._plan = dataclasses.replace(plan, search_id=directory.name)
        self._lines = lines
        self._journal = JournalWriter(directory)
        self._runs = SearchRuns(home, options, self._write, self._raise_if_cancelled)

    def conducted_line(self, conducted: Conducted) -> Conducted:
        """Return this conductor's first line; a subclass adds the options of its search."""
        return conducted

    @abstractmethod
    def open(self) -> None:
        """Prepare the first decision, and end or take over the runs that an earlier conductor left."""

    @abstractmethod
    def step(self) -> EndedT | None:
        """Decide and take one step; return the end after the last one."""

    @abstractmethod
    def end_line(self, state: EndState, reason: str) -> EndedT:
        """Return the last line of a search that ends without a new answer."""

    def run(self) -> EndedT:
        """Continue the search from where its journal ends. A pause of an earlier conductor is over."""
        (self._directory / PAUSE_FILE).unlink(missing_ok=True)
        conductor = identify(os.getpid())
        conducted = Conducted(
            t_ns=self._caller.began_ns or time.monotonic_ns(),
            pid=os.getpid(),
            start_ticks=conductor.start_ticks if conductor else -1,
            boot_id=boot_id(),
        )
        self._write(self.conducted_line(conducted))
        try:
            self.open()
            while True:
                self._wait_while_paused()
                end = self.step()
                if end is not None:
                    return self._write_end(end)
        except Cancelled:
            return self._write_end(self.end_line("cancelled", CANCELLED_REASON))
        except UserError as error:
            with suppress(UserError):  # a full disk takes no last line either
                self._write_end(self.end_line("cancelled", error.line_without_option()))
            raise
        except Exception as error:
            # A screen learns of the error from the journal alone.
            with suppress(UserError):
                self._write_end(self.end_line("failed", f"{type(error).__name__}: {error}"))
            raise

    def close(self) -> None:
        """End the run that is still live, and close the journal."""
        self._runs.stop()
        self._journal.close()

    def _wait_while_paused(self) -> None:
        """Return once the search is not paused; during a pause the search has no process and holds no memory."""
        mark = self._directory / PAUSE_FILE
        if not mark.exists():
            self._raise_if_cancelled()
            return
        self._runs.end_process()
        self._write(Paused())
        wait_until(lambda: not mark.exists(), self._raise_if_cancelled, poll_s=IDLE_POLL_S)
        self._write(Resumed())

    def _raise_if_cancelled(self) -> None:
        if self._caller.is_cancelled():
            raise Cancelled

    def _write_end(self, end: EndedT) -> EndedT:
        """End the live run, append the last line with the search's seconds, and return the line."""
        self._runs.stop()
        end = msgspec.structs.replace(end, seconds=worked_seconds([*self._lines, end]))
        self._write(end)
        return end

    def _write(self, line: Line) -> None:
        """Append a line of this kind of journal."""
        self._journal.write(line)
        own_line = cast(LineT, line)
        self._lines.append(own_line)
        self._caller.on_line(own_line)


def conduct_alone(directory: Path, make_conductor: Callable[[], Conductor[LineT, EndedT]]) -> EndedT:
    """Make the conductor under the search's lock, and conduct the search to its end.

    Raises AlreadyConducted when another process holds the lock.
    """
    with conductor_lock(directory) as is_ours:
        if not is_ours:
            raise AlreadyConducted(
                f"another process runs search {directory.name}",
                key=directory.name,
                advice="a fresh search",
                option="--fresh to start a second search",
            )
        conductor = make_conductor()
        try:
            return conductor.run()
        finally:
            conductor.close()

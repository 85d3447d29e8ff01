"""Work common to the conductors of a batch search and of a best-fit search: one journal, one run at a time.

A conductor holds its search's lock, takes the steps that the search decides, and ends every process it started.
"""

from __future__ import annotations

import math
import os
import threading
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import msgspec

from trainfast_runner.errors import UserError, lowest
from trainfast_runner.machine.processes import boot_id, identify
from trainfast_runner.machine.warm_python import WARM
from trainfast_runner.records.home import PAUSE_FILE, Home, conductor_lock, reason_of
from trainfast_runner.records.json_lines import Tail
from trainfast_runner.records.result import Result
from trainfast_runner.records.run_directory import is_alive, rank_file, read_result
from trainfast_runner.records.run_file import RecordedKnobs
from trainfast_runner.records.worker_lines import WARM_ROLES, WarmLine, WarmOrder
from trainfast_runner.running import launch, planning
from trainfast_runner.running.planning import RunPlan
from trainfast_runner.running.settling import kill_now, request_stop, result_or_none_while_live, stop_unsupervised
from trainfast_runner.search import journal
from trainfast_runner.search.searches import SearchOptions
from trainfast_runner.worker.shared.words import CONTROL_FILE, PROBE, TRIAL

PlanT = TypeVar("PlanT")
EndedT = TypeVar("EndedT", bound=journal.SearchEnded)


@dataclass(frozen=True)
class SearchCaller:
    """Callbacks and start time that the caller of a search gives."""

    on_line: Callable[[Any], None] = lambda line: None
    """Called with every new line of the journal."""
    is_cancelled: Callable[[], bool] = lambda: False
    """Returns True to end the search."""
    began_ns: int | None = None
    """CLOCK_MONOTONIC from which the search's time counts; None for the start of the conductor."""


class AlreadyConducted(UserError):
    """Another process conducts the search."""


class Conductor(ABC, Generic[EndedT]):
    """One process's work on a search, until the search ends or is cancelled.

    A subclass takes the steps: it starts runs through `_runs`, and records with `_write` in `_lines`, the journal so
    far, of the kind `JOURNAL`.
    """

    JOURNAL: ClassVar[type[journal.JournalLines[Any, Any, Any]]]

    def __init__(self, directory: Path, home: Home, options: SearchOptions, caller: SearchCaller) -> None:
        self._directory, self._home = directory, home
        self._options, self._caller = options, caller
        self._lines: list[Any] = [*self.JOURNAL.read(directory).lines]
        self._journal = journal.JournalWriter(directory)
        self._runs = SearchRuns(home, options, self._write, self._raise_if_cancelled)

    @abstractmethod
    def open(self) -> None:
        """Prepare the first decision."""

    @abstractmethod
    def step(self) -> EndedT | None:
        """Decide and take one step; return the end after the last one."""

    @abstractmethod
    def end_line(self, state: journal.EndState, reason: str) -> EndedT:
        """Return the last line of a search that ends without a new answer."""

    def run(self) -> EndedT:
        """Continue the search from where its journal ends. A pause of an earlier conductor is over."""
        (self._directory / PAUSE_FILE).unlink(missing_ok=True)
        conductor = identify(os.getpid())
        self._write(
            journal.Conducted(
                t_ns=self._caller.began_ns or time.monotonic_ns(),
                pid=os.getpid(),
                start_ticks=conductor.start_ticks if conductor else -1,
                boot_id=boot_id(),
            )
        )
        try:
            for run in self._home.runs_of([self._directory.name]):  # that a killed conductor left
                end_if_live(self._home.directory(run.run_id))
            self.open()
            while True:
                self._wait_while_paused()
                end = self.step()
                if end is not None:
                    return self._write_end(end)
        except Cancelled:
            return self._write_end(self.end_line("cancelled", journal.CANCELLED_REASON))
        except (UserError, OSError) as error:
            if isinstance(error, UserError):
                problem = error
            else:  # a full temporary folder, for instance
                words = f"cannot use {error.filename or 'the disk'}: {reason_of(error)}"
                problem = UserError(words, key=self._directory.name, exit_code=4)
            with suppress(UserError):  # a full disk takes no last line either
                self._write_end(self.end_line("cancelled", problem.line_without_option()))
            raise problem from None
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
        self._write(journal.Paused())
        wait_until(lambda: not mark.exists(), self._raise_if_cancelled)
        self._write(journal.Resumed())

    def _raise_if_cancelled(self) -> None:
        if self._caller.is_cancelled():
            raise Cancelled

    def _write_end(self, end: EndedT) -> EndedT:
        """End the live run, append the last line with the search's seconds, and return the line."""
        self._runs.stop()
        end = msgspec.structs.replace(end, seconds=journal.worked_seconds([*self._lines, end]))
        self._write(end)
        return end

    def _write(self, line: journal.Line) -> None:
        """Append a line of this kind of journal."""
        self._journal.write(line)
        self._lines.append(line)
        self._caller.on_line(line)


def conduct(
    kind: Callable[[Path, PlanT, Home, SearchOptions, SearchCaller], Conductor[EndedT]],
    directory: Path,
    plan: PlanT,
    home: Home,
    options: SearchOptions,
    caller: SearchCaller,
) -> EndedT:
    """Conduct the search in `directory` to its end under its lock; record and return the end.

    Raises AlreadyConducted when another process holds the lock, and UserError when the device is in use.
    """
    with conductor_lock(directory) as is_ours:
        if not is_ours:
            raise AlreadyConducted(
                f"another process runs search {directory.name}",
                key=directory.name,
                advice="a fresh search",
                option="--fresh to start a second search",
            )
        with closing(WARM), closing(kind(directory, plan, home, options, caller)) as conductor:
            return conductor.run()


class SearchRuns:
    """Starts and ends the runs of a search.

    `write` appends a line to the journal; `raise_if_cancelled` is called in every wait.
    """

    def __init__(
        self,
        home: Home,
        options: SearchOptions,
        write: Callable[[journal.Line], None],
        raise_if_cancelled: Callable[[], None],
    ) -> None:
        self.process: WarmProcess | None = None
        """The warm process; None without one."""
        self._home, self._options = home, options
        self._write, self._raise_if_cancelled = write, raise_if_cancelled
        self._live_run: Path | None = None
        self._waited_s = 0.0
        """Seconds spent waiting for other runs."""

    def start(self, plan: RunPlan, role: str) -> Path:
        """Start a run once its devices are free; return its directory. Raises UserError."""
        while True:
            if self._options.wait:
                self._wait_for_devices(plan)
            try:
                self._live_run = launch.start(replace(plan, role=role, asked_ns=0), self._home, self._on_wait)
            except planning.DevicesBusy:
                if not self._options.wait:
                    raise
                continue  # another waiting run was faster
            self._write(journal.Launched(run_id=self._live_run.name, role=role))
            if plan.device == "cuda" and role in WARM_ROLES:  # a cold run alone is timed for the answer
                launch.keep_standby(plan, self._home)
            return self._live_run

    def start_process(self, plan: RunPlan, role: str) -> WarmProcess:
        """Start a warm process as `start` does a run, and return it before it is ready."""
        directory = self.start(plan, role)
        self.process = WarmProcess(directory, plan.world_size, self._raise_if_cancelled)
        self.process.descends_from_us = plan.placement is None
        return self.process

    def clock_s(self) -> float:
        """CLOCK_MONOTONIC in seconds, less the time spent waiting for other runs."""
        return time.monotonic() - self._waited_s

    def wait_for_end(self, directory: Path) -> Result:
        """Wait for the end of a run. Raises Cancelled if it was stopped, which is no outcome of its settings."""
        self._live_run = directory
        return self._ended(wait_for_result(directory, self._raise_if_cancelled))

    def end_process(self) -> None:
        """End the warm process, if there is one."""
        if self.process is not None:
            self.process.end()
            self._live_run = self.process = None

    def wait_for_process_end(self) -> Result:
        """Wait for the end of the warm process, which ends by itself, as `wait_for_end` does."""
        assert self.process is not None
        return self._ended(self.process.wait_for_end())

    def _ended(self, result: Result) -> Result:
        """Return the result of the live run, which is over."""
        self._live_run = self.process = None
        if result.state in ("stopped", "killed"):
            raise Cancelled
        return result

    def stop(self) -> None:
        """End the run that is still live, if there is one, without waiting for its replies."""
        if self._live_run is not None:
            end_run(self._live_run)
        if self.process is not None:
            self.process.close()
        self._live_run = self.process = None

    def _on_wait(self, launching: str) -> None:
        self._raise_if_cancelled()
        if launching:
            self._write(journal.Waiting(run_id=launching))

    def _wait_for_devices(self, plan: RunPlan) -> None:
        """Return when no other run uses the plan's devices; `clock_s` stands still meanwhile."""
        other = planning.busy_with(plan, self._home)
        if other is None:
            return
        began_s = time.monotonic()
        self._write(journal.Waiting(run_id=other.run_id))
        planning.wait_for_devices(plan, self._home, lambda run, seconds: self._raise_if_cancelled())
        self._write(journal.Resumed())
        self._waited_s += time.monotonic() - began_s


STOPS_WITHIN_S = 10.0
"""Seconds after which a run that was asked to stop is killed."""


class Cancelled(Exception):
    """Raised when a search, a bench or a wait must stop now: no further run is started."""


def wait_for_result(directory: Path, raise_if_cancelled: Callable[[], None]) -> Result:
    """Wait for the result of a run and return it. Raises UserError if the run ends without one."""
    while (result := _result_if_ended(directory)) is None:
        raise_if_cancelled()
        time.sleep(POLL_S)
    return result


def _result_if_ended(directory: Path) -> Result | None:
    """Return the result of a run; None before it. Raises UserError if the run is gone without a readable result."""
    # The second look also writes the result of a run left behind, and takes longer.
    return read_result(directory) if is_alive(directory) else result_or_none_while_live(directory)


def end_run(directory: Path) -> None:
    """Stop a live run and wait until its last process has ended; SIGKILL after 10 s."""
    deadline_s = time.monotonic() + STOPS_WITHIN_S
    with suppress(UserError):  # the run may end by itself meanwhile
        if not request_stop(directory):
            stop_unsupervised(directory, STOPS_WITHIN_S)
            return
        while read_result(directory) is None and is_alive(directory):
            if time.monotonic() > deadline_s:
                kill_now(directory)
                deadline_s = math.inf
            time.sleep(POLL_S)


def end_text(result: Result) -> str:
    """Return the run, its state and the reason of its end."""
    return f"{result.run_id} ended {result.state}: {result.reason}"


POLL_S = 0.02
"""Seconds between two checks of work that the search itself has begun."""


def wait_until(
    is_over: Callable[[], bool], raise_if_cancelled: Callable[[], None], deadline_s: float = math.inf
) -> None:
    """Return once `is_over()`, at `deadline_s` (time.monotonic) at the latest."""
    while not is_over() and time.monotonic() < deadline_s:
        raise_if_cancelled()
        time.sleep(POLL_S)


WorkT = TypeVar("WorkT")


def run_within(
    seconds: float, work: Callable[[threading.Event], WorkT], raise_if_cancelled: Callable[[], None]
) -> WorkT:
    """Return the result of `work`, in a thread; its argument is set, which ends it, after so many seconds."""
    cancelled = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(work, cancelled)
        try:
            wait_until(future.done, raise_if_cancelled, time.monotonic() + seconds)
        finally:
            cancelled.set()
    return future.result()


class WarmProcess:
    """The run that tries sizes or candidates in one process per rank; `raise_if_cancelled` is called in every wait.

    An answer of the ranks is None when the run ended without one. Raises UserError when an order cannot be written.
    """

    def __init__(self, directory: Path, world_size: int, raise_if_cancelled: Callable[[], None]) -> None:
        self.directory = directory
        self.result: Result | None = None
        """The run's result; None while it lives."""
        self.ended_by_error = False
        """True once a rank answered that an exception ended its process: no further order is taken."""
        self.descends_from_us = True
        """False on several nodes: their supervisors are no children of this process, and look like strangers."""
        self._raise_if_cancelled = raise_if_cancelled
        self._tails = [Tail(rank_file(directory, "worker", rank), WarmLine) for rank in range(world_size)]
        self._control = journal.JournalWriter(directory, CONTROL_FILE)
        self._orders_written = 0
        self._answers: dict[int, dict[int, Any]] = defaultdict(dict)
        """The answers to each order, by its number from 1 on and by rank; under 0 the lines of ranks that are ready."""

    @property
    def available_bytes(self) -> int | None:
        """The least available memory of a rank when it was ready; None if no ready rank knows its own."""
        return lowest(line.available_bytes for line in self._answers[0].values())

    def ready(self) -> dict[int, WarmLine] | None:
        """Wait until every rank is ready; return their lines by rank."""
        return self._wait_for_answers(0)

    def probe(self, batch_size: int, steps: int) -> dict[int, WarmLine] | None:
        """Try a size; return the ranks' lines (one suffices if memory ran out)."""
        return self._answers_to(WarmOrder(do=PROBE, batch_size=batch_size, steps=steps))

    def trial(
        self, knobs: RecordedKnobs, untimed: int, steps: int, *, more: bool = False
    ) -> dict[int, WarmLine] | None:
        """Try a candidate, or with `more` take further timed steps of the last one; return the ranks' lines.

        One line suffices if an exception ended its process. `knobs` override those of the process's run; every order
        names the same ones.
        """
        return self._answers_to(WarmOrder(do=TRIAL, knobs=knobs, untimed=untimed, steps=steps, more=more))

    def end(self) -> None:
        """Order the end and wait until the run is over."""
        if self.result is None:
            self._control.write(WarmOrder(do="end"))
            self.wait_for_end()
        self.close()

    def wait_for_end(self) -> Result:
        """Wait for the run's result and return it; no order can be given afterwards."""
        self._wait(lambda: False)
        assert self.result is not None
        self.close()
        return self.result

    def close(self) -> None:
        """Close the file of orders."""
        self._control.close()

    def _answers_to(self, order: WarmOrder) -> dict[int, Any] | None:
        self._orders_written += 1
        self._control.write(order)
        return self._wait_for_answers(self._orders_written)

    def _wait_for_answers(self, number: int) -> dict[int, Any] | None:
        """Return the answers to an order by rank; one suffices if an exception ended its process."""
        answers = self._answers[number]

        def is_over() -> bool:
            return len(answers) == len(self._tails) or (number > 0 and self.ended_by_error)

        return answers if self._wait(is_over) else None

    def _wait(self, is_over: Callable[[], bool]) -> bool:
        """Wait until `is_over()`; return False if the run ended before."""

        def is_over_or_ended() -> bool:
            self._read()
            return is_over() or self.result is not None

        wait_until(is_over_or_ended, self._raise_if_cancelled)
        return is_over()

    def _read(self) -> None:
        # The result is read before the lines: all lines of an ended run are then there.
        self.result = _result_if_ended(self.directory)
        for rank, tail in enumerate(self._tails):
            for line in tail.new():
                self.ended_by_error |= line.ended_process
                if line.kind == "ready":
                    self._answers[0][rank] = line
                elif line.number is not None and line.kind in (PROBE, TRIAL):
                    self._answers[line.number][rank] = line


def end_if_live(directory: Path) -> None:
    """End a run if it is still live."""
    if read_result(directory) is None and is_alive(directory):
        end_run(directory)

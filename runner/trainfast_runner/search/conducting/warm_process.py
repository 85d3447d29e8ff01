"""The warm process of a search, which tries batch sizes or candidates one after another."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from trainfast_runner.known_values import lowest
from trainfast_runner.records.home import home_error
from trainfast_runner.records.json_lines import Appender
from trainfast_runner.records.result import Result
from trainfast_runner.records.run_directory import RESULT_FILE, rank_file
from trainfast_runner.records.run_file import RecordedKnobs
from trainfast_runner.records.warm_process import (
    EndOrder,
    ProbeLine,
    ProbeOrder,
    TrialLine,
    TrialOrder,
    WarmLine,
    WarmTail,
)
from trainfast_runner.search.conducting.run_ends import ResultWatch
from trainfast_runner.search.conducting.waiting import POLL_S
from trainfast_runner.worker.shared.search_roles import CONTROL_FILE, PROBE, TRIAL

STATE_EVERY_S = 0.25
"""Seconds between checks that a run without a result is alive."""

LineT = TypeVar("LineT", bound=WarmLine)


class WarmProcess:
    """The run that tries sizes or candidates in one process per rank; `raise_if_cancelled` is called in every wait.

    An answer of the ranks is None when the run ended without one. Raises UserError when an order cannot be written.
    """

    def __init__(self, directory: Path, world_size: int, raise_if_cancelled: Callable[[], None]) -> None:
        self.directory = directory
        self.result: Result | None = None
        """The run's result; None while it lives."""
        self.pids: set[int] = set()
        """The processes of the ranks that have started."""
        self.ended_by_error = False
        """True once a rank answered that an exception ended its process: no further order is taken."""
        self._raise_if_cancelled = raise_if_cancelled
        self._tails = [WarmTail(rank_file(directory, "worker", rank)) for rank in range(world_size)]
        self._control = Appender(directory / CONTROL_FILE)
        self._orders_written = 0
        self._ready: dict[int, WarmLine] = {}
        self._probes: dict[int, dict[int, ProbeLine]] = {}
        self._trials: dict[int, dict[int, TrialLine]] = {}

    @property
    def available_bytes(self) -> int | None:
        """The least available memory of a rank when it was ready; None if no ready rank knows its own."""
        return lowest(line.available_bytes for line in self._ready.values())

    def ready(self) -> dict[int, WarmLine] | None:
        """Wait until every rank is ready; return their lines by rank."""
        return self._ready if self._wait(lambda: len(self._ready) == len(self._tails)) else None

    def probe(self, batch_size: int, steps: int) -> dict[int, ProbeLine] | None:
        """Try a size; return the ranks' lines (one suffices if memory ran out)."""
        return self._replies_to(ProbeOrder(do=PROBE, batch_size=batch_size, steps=steps), self._probes)

    def trial(
        self, knobs: RecordedKnobs, untimed: int, steps: int, *, more: bool = False
    ) -> dict[int, TrialLine] | None:
        """Try a candidate, or with `more` take further timed steps of the last one; return the ranks' lines.

        One line suffices if an exception ended its process. `knobs` override those of the process's run; every order
        names the same ones.
        """
        order = TrialOrder(do=TRIAL, knobs=knobs, untimed=untimed, steps=steps, more=more)
        return self._replies_to(order, self._trials)

    def end(self) -> None:
        """Order the end and wait until the run is over."""
        if self.result is None:
            self._give(EndOrder())
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

    def _give(self, order: ProbeOrder | TrialOrder | EndOrder) -> None:
        try:
            self._control.write(order)
        except OSError as error:
            raise home_error(self.directory, error) from None

    def _replies_to(
        self, order: ProbeOrder | TrialOrder, replies: dict[int, dict[int, LineT]]
    ) -> dict[int, LineT] | None:
        self._orders_written += 1
        number = self._orders_written
        self._give(order)

        def is_over() -> bool:
            return len(replies.get(number, {})) == len(self._tails) or self.ended_by_error

        return replies[number] if self._wait(is_over) else None

    def _wait(self, is_over: Callable[[], bool]) -> bool:
        """Wait until `is_over()`; return False if the run ended before."""
        looked_s, watch = 0.0, ResultWatch(self.directory)
        while True:
            # The result is read before the lines: all lines of an ended run are then there.
            if (self.directory / RESULT_FILE).exists() or time.monotonic() - looked_s > STATE_EVERY_S:
                looked_s = time.monotonic()
                self.result = watch.result()
            self._read()
            if is_over():
                return True
            if self.result is not None:
                return False
            self._raise_if_cancelled()
            time.sleep(POLL_S)

    def _read(self) -> None:
        for rank, tail in enumerate(self._tails):
            for line in tail.new():
                self.ended_by_error |= line.ended_process
                if line.kind == "started" and line.pid is not None:
                    self.pids.add(line.pid)
                elif line.kind == "ready":
                    self._ready[rank] = line
                elif isinstance(line, ProbeLine) and line.number is not None:
                    self._probes.setdefault(line.number, {})[rank] = line
                elif isinstance(line, TrialLine) and line.number is not None:
                    self._trials.setdefault(line.number, {})[rank] = line

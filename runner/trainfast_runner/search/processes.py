"""The processes of a search: the warm one that tries sizes, waiting for results, ending runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from trainfast_runner.errors import UserError
from trainfast_runner.records.home import RESULT_FILE, is_alive, read_result
from trainfast_runner.records.json_lines import Appender, Tail
from trainfast_runner.records.result import Result
from trainfast_runner.records.run_file import Count, ProbeOrder
from trainfast_runner.records.run_records import CONTROL_FILE, rank_file
from trainfast_runner.running.recovery import settle, state_of
from trainfast_runner.running.stopping import kill_now, request_stop, stop_unsupervised

LOOK_EVERY_S = 0.02
STATE_EVERY_S = 0.25
STOPS_WITHIN_S = 10.0
RESULT_WITHIN_S = 5.0


class Interrupted(Exception):
    """Raised when the search must stop now: its run is ended and nothing more started."""


class ProbeLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line of `worker.jsonl` with the fields a search reads: of kind probing (ready), probe or started."""

    t_ns: Count
    kind: str
    pid: Count | None = None
    number: int | None = None
    outcome: str | None = None
    rank: int | None = None
    phase: str | None = None
    message: str | None = None
    seconds: float | None = None
    phase_peaks: dict[str, int] = {}
    peak_allocated_bytes: Count | None = None
    peak_reserved_bytes: Count | None = None
    limit_peak_bytes: Count | None = None
    room_bytes: Count | None = None
    room_after_bytes: Count | None = None
    alloc_retries: Count | None = None
    samples: Count | None = None
    step_ms: list[float] = []


class WarmProcess:
    """The run that tries sizes in one process per rank. `check` is called while waiting and may raise Interrupted."""

    def __init__(self, directory: Path, world_size: int, check: Callable[[], None]) -> None:
        self.directory = directory
        self.result: Result | None = None
        """The run's result; None while it lives."""
        self._check = check
        self._tails = [Tail(rank_file(directory, "worker", rank), ProbeLine) for rank in range(world_size)]
        self._control = Appender(directory / CONTROL_FILE)
        self._asked = 0
        self._ready: dict[int, ProbeLine] = {}
        self._answers: dict[int, dict[int, ProbeLine]] = {}
        self.pids: set[int] = set()

    def ready(self) -> dict[int, ProbeLine] | None:
        """Wait until every rank is ready; return their lines by rank, or None when the run ended before."""
        return self._wait(lambda: len(self._ready) == len(self._tails), lambda: self._ready)

    def probe(self, batch_size: int, steps: int) -> dict[int, ProbeLine] | None:
        """Try a size; return the ranks' lines (one suffices if memory ran out), or None when the run ended silently."""
        self._asked += 1
        number = self._asked
        self._control.write(ProbeOrder(do="probe", batch_size=batch_size, steps=steps))

        def over() -> bool:
            answers = self._answers.get(number, {})
            return len(answers) == len(self._tails) or any(line.outcome == "oom" for line in answers.values())

        return self._wait(over, lambda: self._answers[number])

    def end(self) -> None:
        """Order the end and wait until the run is over."""
        if self.result is None:
            self._control.write(ProbeOrder(do="end"))
            self.wait_for_end()
        self._control.close()

    def wait_for_end(self) -> Result:
        """Wait for the run's result and return it."""
        self._wait(lambda: False, lambda: {})
        assert self.result is not None
        return self.result

    def _wait(self, over: Callable[[], bool], lines: Callable[[], dict[int, ProbeLine]]) -> dict[int, ProbeLine] | None:
        looked, end = 0.0, _End(self.directory)
        while True:
            # The result is looked at before the lines: all lines of an ended run are then there.
            if (self.directory / RESULT_FILE).exists() or time.monotonic() - looked > STATE_EVERY_S:
                looked = time.monotonic()
                self.result = end.result()
            self._read()
            if over():
                return lines()
            if self.result is not None:
                return None
            self._check()
            time.sleep(LOOK_EVERY_S)

    def _read(self) -> None:
        for rank, tail in enumerate(self._tails):
            for line in tail.new():
                if line.kind == "started" and line.pid is not None:
                    self.pids.add(line.pid)
                elif line.kind == "probing":
                    self._ready[rank] = line
                elif line.kind == "probe" and line.number is not None:
                    self._answers.setdefault(line.number, {})[rank] = line


def wait_for_result(directory: Path, check: Callable[[], None]) -> Result:
    """Wait for the result of a run and return it. Raises UserError if the run ends without one."""
    end = _End(directory)
    while (result := end.result()) is None:
        check()
        time.sleep(LOOK_EVERY_S)
    return result


class _End:
    """Watches for the end of a run."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._gone_since: float | None = None

    def result(self) -> Result | None:
        """The result; None while there is none. Raises UserError when the run is gone and left none to read."""
        result = read_result(self._directory)
        if result is not None and result.provisional:
            result = settle(self._directory)  # its supervisor was killed in the analysis
        # The supervisor records the end a moment before it writes the result; `state_of` settles a lost run.
        if result is not None or not state_of(self._directory).ended or is_alive(self._directory):
            self._gone_since = None
        elif self._gone_since is None:
            self._gone_since = time.monotonic()
        elif time.monotonic() - self._gone_since > RESULT_WITHIN_S:
            raise UserError(f"{self._directory.name} has no readable result", key=self._directory.name, exit_code=5)
        return result


def end_run(directory: Path) -> None:
    """Stop a run that is live and wait until nothing of it is left; SIGKILL after 10 s."""
    deadline = time.monotonic() + STOPS_WITHIN_S
    try:
        if not request_stop(directory):
            stop_unsupervised(directory, STOPS_WITHIN_S)
            return
        while read_result(directory) is None and is_alive(directory):
            if time.monotonic() > deadline:
                kill_now(directory)
                deadline = float("inf")
            time.sleep(LOOK_EVERY_S)
    except UserError:
        return  # it ended by itself meanwhile

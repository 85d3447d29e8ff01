"""Locks on files, and one run's directory: the names of its files, whether it has ended, and its records.

Records are read as far as they are readable: half-written, cut or damaged files included. Memory is bounded: files have
caps, and of the steps of many ranks an even share is kept.
"""

from __future__ import annotations

import errno
import fcntl
import math
import os
import re
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from trainfast_runner.records import json_lines
from trainfast_runner.records.capped_file import CAP_BYTES, RecordTail
from trainfast_runner.records.result import Result, Thinning
from trainfast_runner.records.run_file import RunFile
from trainfast_runner.records.run_lines import Event, Step, StepTotals
from trainfast_runner.records.tick import HostReading, Tick, TimedReadings, readings_by_device
from trainfast_runner.records.worker_lines import WARM_ROLES, StartedLine, WorkerLine, WorkerTail, read_knobs_tried
from trainfast_runner.worker.shared.host import ALIVE_LOCK_FILE, OnWait, print_holder, wait_for_lock
from trainfast_runner.worker.shared.words import CONTROL_FILE

READERS_WITHIN_S = 0.1
"""Seconds of tries for a lock that a reader may hold for an instant."""


@contextmanager
def locked(
    path: Path, kind: int = fcntl.LOCK_EX, on_wait: OnWait = print_holder, within_s: float = math.inf
) -> Iterator[int]:
    """Hold the lock of this file, which is made if need be; waits for its holders, yields the descriptor.

    Raises TimeoutError, an OSError, if they keep it for `within_s` seconds.
    """
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "rb") as file:
        if not wait_for_lock(file.fileno(), kind, on_wait, within_s):
            raise TimeoutError(errno.ETIMEDOUT, f"still locked after {within_s:g} s", str(path))
        yield file.fileno()


def is_locked(path: Path, against: int) -> bool:
    """True if another lock on the file forbids this kind (`LOCK_EX`, `LOCK_SH`).

    Raises OSError if the file cannot be opened.
    """
    with os.fdopen(open_lock(path), "rb") as file:
        try:
            fcntl.flock(file, against | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@contextmanager
def exclusive_lock(path: Path, *, create: bool) -> Iterator[bool]:
    """Hold the lock of this file alone; False if another process keeps it longer than a reader, which has it for an
    instant. With no file, and none to `create`, no process can hold it. Raises OSError."""
    if not create and not path.exists():
        yield True
        return
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600) if create else open_lock(path)
    with os.fdopen(fd, "rb"):
        yield wait_for_lock(fd, fcntl.LOCK_EX, within_s=READERS_WITHIN_S)


def shared_lock(directory: Path) -> AbstractContextManager[int]:
    """Hold the run's lock as one of the processes that keep it alive; yields the descriptor."""
    return locked(directory / ALIVE_LOCK_FILE, fcntl.LOCK_SH)


def is_alive(directory: Path) -> bool:
    """True if any process of the run still holds its lock, or if this user cannot look at the lock."""
    try:
        return is_locked(directory / ALIVE_LOCK_FILE, fcntl.LOCK_EX)
    except FileNotFoundError:
        return False
    except OSError as error:
        if error.errno in json_lines.UNREADABLE:
            return True
        raise


def open_lock(path: Path) -> int:
    """Return the descriptor of a lock's file, opened for an exclusive lock. Raises OSError."""
    try:
        # NFS gives an exclusive lock only on a writable descriptor.
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        return json_lines.open_regular(path)


T = TypeVar("T")

RUN_FILE = "run.json"
RESULT_FILE = "result.json"
EVENTS_FILE = "events.jsonl"
TELEMETRY_FILE = "telemetry.jsonl"
SUPERVISOR_LOG = "supervisor.log"
SANDBOX_FOLDER = "sandbox"
"""The folder of a trial's files, as the hooks in the script name it."""
LEAVING_S = 5.0
"""Time for a supervisor from `result.json` to its own end."""
POLL_S = 0.02
"""Chosen, not measured: seconds between two looks at its end."""


def node_file(directory: Path, name: str, node: int) -> Path:
    """`events.jsonl` of node 0, `node1.events.jsonl` of node 1, and so on."""
    return directory / (name if node == 0 else f"node{node}.{name}")


def rank_file(directory: Path, name: str, rank: int) -> Path:
    """`steps.jsonl` of rank 0, `steps.rank1.jsonl` of rank 1, and so on; `name` is steps or worker."""
    return directory / (f"{name}.jsonl" if rank == 0 else f"{name}.rank{rank}.jsonl")


def rank_files(directory: Path, name: str) -> dict[int, Path]:
    """The files of that name that exist, by rank in order."""
    pattern = re.compile(rf"{name}(?:\.rank(\d+))?\.jsonl")
    matches = ((pattern.fullmatch(path.name), path) for path in directory.glob(f"{name}*.jsonl"))
    return dict(sorted((int(match[1] or 0), path) for match, path in matches if match))


def read_run_file(directory: Path) -> RunFile | None:
    """`run.json`, or None when it is missing, damaged, or not this user's to read."""
    return _decoded_file(directory / RUN_FILE, RunFile)


def is_listed(directory: Path) -> bool:
    """True unless a search tried settings in the run, which its search shows, or it is unreadable."""
    run = read_run_file(directory)
    return unreadable_reason(directory) is None if run is None else run.role not in WARM_ROLES


def unreadable_reason(directory: Path) -> str | None:
    """The reason that a run's files cannot be read, with their owner; None if each can, or is missing."""
    for name in (RUN_FILE, RESULT_FILE, ALIVE_LOCK_FILE):
        try:
            os.close(json_lines.open_regular(directory / name))
        except OSError as error:
            if error.errno in json_lines.UNREADABLE:
                return f"{name} cannot be read: {error.strerror}; it belongs to {json_lines.owner_of(directory / name)}"
    return None


def read_result(directory: Path) -> Result | None:
    """`result.json`, or None when the run has not ended, or the file is damaged or not this user's to read."""
    return _decoded_file(directory / RESULT_FILE, Result)


def is_unfinished(directory: Path) -> bool:
    """True while a process of the run is alive and its result is not written."""
    return is_alive(directory) and unreadable_reason(directory) is None and not (directory / RESULT_FILE).exists()


def is_alive_after_grace(directory: Path) -> bool:
    """True if the run is alive; a run with a result first gets the time that its supervisor needs to end."""
    deadline_s = time.monotonic() + LEAVING_S
    while is_alive(directory):
        if time.monotonic() > deadline_s or not (directory / RESULT_FILE).exists():
            return True
        time.sleep(POLL_S)
    return False


def _decoded_file(path: Path, record: type[T]) -> T | None:
    try:
        return msgspec.json.decode(json_lines.read_regular(path), type=record)
    except (FileNotFoundError, NotADirectoryError, *json_lines.DAMAGE):
        return None
    except OSError as error:
        if error.errno in json_lines.UNREADABLE:
            return None
        raise


EXIT_CODES = {
    "finished": 0,
    "oom": 3,
    "failed": 4,
    "stopped": 130,
    "killed": 4,
    "lost": 5,
    "failed_to_start": 4,
    "unreadable": 2,
}
END_STATES = frozenset(EXIT_CODES)
"""States of a run that is not followed: it has ended, or this user cannot read it."""
STATES = ("starting", "running", "stopping", *EXIT_CODES)
"""Every state, in the order in which they are listed."""
STATE_WORDS = {"oom": "out of memory", "failed_to_start": "failed to start"}
NO_STEP = "no optimizer step seen"
"""Begins the reason of a script's run that finished without a step."""


def exit_code_of(state: str) -> int:
    """Return the exit code of a command whose run ended in this state; that of "failed" for a newer version's state."""
    return EXIT_CODES.get(state, EXIT_CODES["failed"])


def state_text(state: str) -> str:
    """A state in words."""
    return STATE_WORDS.get(state, state.replace("_", " "))


def notable_reason(state: str, reason: str) -> str:
    """The reason to print beside a state; empty for a finished run, unless none of its steps was seen."""
    return reason if state != "finished" or reason.startswith(NO_STEP) else ""


MOST_STEP_BYTES = CAP_BYTES * 5 // 4
"""Records of the steps kept of all ranks, about 160 MB in memory: of one rank all under the cap of its file."""


@dataclass
class RunRecords:
    """One run's records. In a long run steps are the share that `thinning` describes."""

    run: RunFile | None = None
    steps: dict[int, list[Step]] = field(default_factory=dict)
    """Steps by rank."""
    worker_lines: dict[int, list[WorkerLine]] = field(default_factory=dict)
    """Lines by rank."""
    device_samples: TimedReadings = field(default_factory=dict)
    """Samples of the run's devices."""
    host_samples: list[tuple[int, HostReading]] = field(default_factory=list)
    """Samples, each after its time (CLOCK_MONOTONIC ns)."""
    events: list[Event] = field(default_factory=list)
    tried: list[dict[str, Any]] = field(default_factory=list)
    """Knobs of each setting that a search's warm process tried; it ended at the last."""
    unreadable_lines: int = 0
    thinning: Thinning | None = None
    """None when all records are here."""
    totals_by_rank: dict[int, StepTotals] = field(default_factory=dict)

    @property
    def first_rank_steps(self) -> list[Step]:
        """The steps of the lowest rank; empty before the first one."""
        return self.steps[min(self.steps)] if self.steps else []

    def totals(self, rank: int) -> StepTotals:
        """Totals over all steps of a rank, including those left out."""
        return self.totals_by_rank.get(rank, StepTotals())

    def last_t_ns(self) -> int | None:
        """The time of the last record, telemetry left out."""
        times = [steps[-1].t_ns for steps in self.steps.values() if steps]
        times += [lines[-1].t_ns for lines in self.worker_lines.values() if lines]
        times += [event.t_ns for event in self.events[-1:]]
        return max(times, default=None)


def read_records(directory: Path) -> RunRecords:
    """Every readable record of a run, of a long one a share; unreadable lines are counted, never raised."""
    records = RunRecords(run=read_run_file(directory))
    records.worker_lines = read_worker_lines(directory, records)
    records.events = read_events(directory, records)
    records.tried = read_knobs_tried(directory / CONTROL_FILE, records.run)
    _read_steps(directory, records)
    shifts_ns = _clock_shifts_ns(directory, records.run)
    _bring_to_one_clock(records, shifts_ns)
    _read_ticks(directory, records, 0, 0)
    for node in range(1, len(records.run.nodes) if records.run is not None else 0):
        _read_ticks(directory, records, node, shifts_ns.get(node, 0))
    return records


def read_events(directory: Path, records: RunRecords, node: int = 0) -> list[Event]:
    """The events of the supervisor on that node; unreadable lines are counted in `records`."""
    return list(_readable_records(json_lines.Tail(node_file(directory, EVENTS_FILE, node), Event), records))


def _clock_shifts_ns(directory: Path, run: RunFile | None) -> dict[int, int]:
    """Nanoseconds that bring the times of each node (CLOCK_MONOTONIC) to node 0's clock, where those differ.

    By the wall clocks at the start of each node: as wrong as those differ, which `doctor --hosts` shows.
    """
    starts = {}
    for node in range(len(run.nodes) if run is not None else 0):
        events = read_events(directory, RunRecords(), node)
        starts[node] = next((event.node for event in events if event.node is not None), None)
    if (first := starts.get(0)) is None:
        return {}
    return {
        node: (start.wall_ns - start.monotonic_ns) - (first.wall_ns - first.monotonic_ns)
        for node, start in starts.items()
        if start is not None and start.boot_id != first.boot_id
    }


def _bring_to_one_clock(records: RunRecords, shifts_ns: dict[int, int]) -> None:
    """Bring the steps and lines of the ranks on other machines to node 0's clock."""
    for rank, lines in records.worker_lines.items():
        started = next((line for line in lines if isinstance(line, StartedLine)), None)
        if started is None or (shift_ns := shifts_ns.get(started.node)) is None:
            continue
        lines[:] = [_shifted(line, shift_ns) for line in lines]
        records.steps[rank] = [_shifted(step, shift_ns) for step in records.steps.get(rank, [])]


Timed = TypeVar("Timed", WorkerLine, Step)


def _shifted(record: Timed, shift_ns: int) -> Timed:
    return msgspec.structs.replace(record, t_ns=max(0, record.t_ns + shift_ns))


def read_worker_lines(directory: Path, records: RunRecords | None = None) -> dict[int, list[WorkerLine]]:
    """The worker lines of each rank; unreadable lines are counted in `records`, if given."""
    counted = records or RunRecords()
    return {
        rank: list(_readable_records(WorkerTail(path), counted))
        for rank, path in rank_files(directory, "worker").items()
    }


def _read_steps(directory: Path, records: RunRecords) -> None:
    files = rank_files(directory, "steps")
    # Rates are of steps that all ranks have: every rank keeps the same.
    share = json_lines.one_in(files.values(), MOST_STEP_BYTES)
    for rank, path in files.items():
        tail, totals = RecordTail(path, Step), StepTotals()
        numbered = ((step.step, step) for step in map(totals.add, _readable_records(tail, records)))
        records.steps[rank], records.totals_by_rank[rank] = json_lines.even_share(numbered, share), totals
        totals.dropped = totals.missing if tail.dropped_bytes else 0
    first = records.totals(min(records.steps, default=0))
    if first.dropped or share > 1:
        records.thinning = Thinning(steps_looked_at=len(records.first_rank_steps), steps_dropped=first.dropped)


def _read_ticks(directory: Path, records: RunRecords, node: int, shift_ns: int) -> None:
    """Ticks are many: only the devices of this run are kept, and of the hosts' readings node 0's."""
    uuids = {*records.run.watch_uuids, *records.run.device_uuids} if records.run else set()
    for tick in _readable_records(RecordTail(node_file(directory, TELEMETRY_FILE, node), Tick), records):
        if node == 0:
            records.host_samples.append((tick.t_ns, tick.host))
        for uuid, readings in readings_by_device([tick]).items():
            if uuid in uuids:
                shifted = [(t_ns + shift_ns, reading) for t_ns, reading in readings]
                records.device_samples.setdefault(uuid, []).extend(shifted)


def _readable_records(tail: json_lines.Tail[T], records: RunRecords) -> Iterator[T]:
    try:
        yield from json_lines.remaining_records(tail)
    except OSError:
        records.unreadable_lines += 1
        return
    records.unreadable_lines += tail.unreadable

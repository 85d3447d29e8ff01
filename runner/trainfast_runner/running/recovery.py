"""The state of a run directory: live, ended, or left behind by a supervisor that died."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from trainfast_runner.machine.processes.family import session_members
from trainfast_runner.machine.processes.identity import Identity, boot_id, has_open, is_running
from trainfast_runner.records.file_locks import (
    LOCK_FILE,
    LOCK_PAUSE_S,
    LOCK_TRIES,
    is_alive,
    open_lock,
    try_exclusive_lock,
)
from trainfast_runner.records.home import Home
from trainfast_runner.records.json_lines import Tail, remaining_records
from trainfast_runner.records.result import Result, RunError
from trainfast_runner.records.run_directory import (
    RESULT_FILE,
    RUN_FILE,
    read_result,
    read_run_file,
    read_written_result,
)
from trainfast_runner.records.run_file import END_STATES, SCHEMA, RunFile
from trainfast_runner.records.run_lines import Event
from trainfast_runner.records.run_records import EVENTS_FILE, RunRecords, worker_lines
from trainfast_runner.results.ended_result import read_records_or_note_trouble, result_with_figures, write_result
from trainfast_runner.results.verdict import Verdict, one_line
from trainfast_runner.running.scripts.sandbox import remove_sandbox

BEING_MADE_S = 10.0
"""A directory without `run.json` this young is a run that is just being launched."""
_KINDS_OF_STATE = frozenset(("supervisor", "launched", "state", "stop_requested"))


@dataclass(frozen=True)
class RunState:
    """A run at this moment. `stop_deadline_ns` (CLOCK_MONOTONIC) is when a stop that was asked for becomes SIGKILL.

    `supervised` is False for a run that has ended, and for one that goes on without its supervisor.
    """

    state: str
    supervised: bool = False
    supervisor_pid: int | None = None
    reason: str | None = None
    stop_deadline_ns: int | None = None

    @property
    def ended(self) -> bool:
        """True if the run is over."""
        return self.state in END_STATES


class StateEvents:
    """The events of a run about its state; a second read takes only new lines."""

    def __init__(self, directory: Path) -> None:
        self._tail = Tail(directory / EVENTS_FILE, Event)
        self._events: list[Event] = []

    def read(self) -> list[Event]:
        """All of them up to now, oldest first."""
        with contextlib.suppress(OSError):
            self._events += [event for event in remaining_records(self._tail) if event.kind in _KINDS_OF_STATE]
        return self._events


def settled_state(directory: Path, run: RunFile | None = None, events: StateEvents | None = None) -> RunState:
    """Return the state of the run, after writing the result of a lost one.

    A run left behind gets its result written on the way: `lost`, or the verdict's. `run` is its `run.json`, if the
    caller has read it; `events` is kept by a caller who asks more than once.
    """
    events = events or StateEvents(directory)
    result = read_result(directory)
    if result is not None and is_whole(result):
        return RunState(state=result.state, reason=result.reason)
    if is_alive(directory):
        live = _live_state(directory, run, events)
        if live.supervised or _is_still_alive(directory):
            return live
    result = settle(directory)
    if result is not None:
        return RunState(state=result.state, reason=result.reason)
    if not (directory / RUN_FILE).exists() and _is_young(directory):
        return RunState(state="starting")
    if is_alive(directory):
        return _live_state(directory, run, events)
    if _result_is_newer(directory):
        return RunState(state="lost", reason="result.json was written by a newer trainfast-tui: update this one")
    return RunState(state="lost", reason="run.json is missing or unreadable: nothing is known of this run")


def settle(directory: Path) -> Result | None:
    """The result of a run that has ended, written now from its records when its supervisor could not.

    None while anything of it is alive, where there is no readable `run.json`, and where a newer version wrote the
    result in a way that this one cannot read. In a home that cannot be written the result is given all the same.
    """
    result = read_result(directory)
    if is_whole(result) or read_run_file(directory) is None:
        return result
    with _exclusive_lock(directory) as is_locked:
        if not is_locked:
            return read_result(directory)
        # The last holder of the lock may have written the result.
        result = read_written_result(directory)
        if is_whole(result) or _result_is_newer(directory):
            return result
        records = read_records_or_note_trouble(directory)
        why = "the supervisor ended before the run did"
        verdict = lost_verdict(records, why) if result is None else Verdict(result.state, result.reason, result.error)
        result = result_with_figures(directory, records, verdict, records.last_t_ns())
        with contextlib.suppress(OSError):  # A full or read-only disk: the next reader tries again.
            write_result(directory, result)
        remove_sandbox(directory)
        return result


def is_whole(result: Result | None) -> bool:
    """True for a result with its figures: a supervisor that was killed leaves a provisional one."""
    return result is not None and not result.provisional


def _result_is_newer(directory: Path) -> bool:
    """True if the unreadable `result.json` is whole, and of a newer schema."""
    try:
        return msgspec.json.decode((directory / RESULT_FILE).read_bytes(), type=_Versioned).schema > SCHEMA
    except (OSError, msgspec.DecodeError):
        return False


class _Versioned(msgspec.Struct, frozen=True):
    schema: int = 0


def live_runs(home: Home) -> list[RunFile]:
    """The live runs of this home, newest first."""
    return [run for directory in home.live_directories() if (run := read_run_file(directory)) is not None]


def supervisor_of(directory: Path) -> Identity | None:
    """The run's supervisor if it is running, in this boot of the machine."""
    return _recorded_process(read_run_file(directory), "supervisor", StateEvents(directory).read())


def launched_child_of(directory: Path) -> Identity | None:
    """The training's direct child (python, or torchrun) if it is running, in this boot of the machine."""
    return _recorded_process(read_run_file(directory), "launched", StateEvents(directory).read())


def running_ranks(directory: Path) -> list[Identity]:
    """The ranks that are running, in this boot of the machine."""
    return [rank for rank in _started_ranks(directory) if is_running(rank)]


def forks_left_by(directory: Path) -> list[Identity]:
    """The running processes that a leader of the run, its direct child or a rank, left in its session when it ended.

    Each holds the run's lock: a process with only the session's number is another program's.
    """
    launched = [
        Identity(event.pid, event.start_ticks)
        for event in StateEvents(directory).read()
        if event.kind == "launched" and event.pid is not None and event.start_ticks is not None
    ]
    leaders = [*launched, *_started_ranks(directory)] if _this_boot(read_run_file(directory)) else []
    members = {member for leader in leaders if not is_running(leader) for member in session_members(leader)}
    return [member for member in members if has_open(member.pid, directory / LOCK_FILE)]


def _started_ranks(directory: Path) -> list[Identity]:
    """Every rank that recorded its start, in this boot of the machine."""
    if not _this_boot(read_run_file(directory)):
        return []
    return [
        Identity(line.pid, line.start_ticks)
        for lines in worker_lines(directory).values()
        for line in lines
        if line.kind == "started" and line.pid is not None and line.start_ticks is not None
    ]


def _recorded_process(run: RunFile | None, kind: str, events: list[Event]) -> Identity | None:
    """The process of the newest event of this kind, if it is running, in this boot of the machine."""
    if not _this_boot(run):
        return None
    for event in reversed(events):
        if event.kind == kind and event.pid is not None and event.start_ticks is not None:
            process = Identity(event.pid, event.start_ticks)
            return process if is_running(process) else None
    return None


def _this_boot(run: RunFile | None) -> bool:
    """True if the run's pids are of this boot."""
    return run is not None and run.boot_id in ("", boot_id())


def _live_state(directory: Path, run: RunFile | None, state_events: StateEvents) -> RunState:
    """The state of a run whose lock is held."""
    events = state_events.read()
    supervisor = _recorded_process(run or read_run_file(directory), "supervisor", events)
    if supervisor is None:
        # Before its first event there is no supervisor to be missing: the launcher holds the lock.
        if not any(event.kind == "supervisor" for event in events):
            return RunState(state="starting")
        return RunState(state="running", reason="its supervisor is gone; the training goes on without it")
    state = next((event for event in reversed(events) if event.kind == "state" and event.state), None)
    stop = next((event for event in reversed(events) if event.kind == "stop_requested"), None)
    return RunState(
        state=state.state if state and state.state else "starting",
        supervised=True,
        supervisor_pid=supervisor.pid,
        reason=state.reason if state else None,
        stop_deadline_ns=stop.deadline_ns if stop else None,
    )


def lost_verdict(records: RunRecords, why: str) -> Verdict:
    """The verdict on a run whose supervisor died: `why`, and the end that its records show."""
    steps = max((line[-1].step for line in records.steps.values() if line), default=0)
    parts = [f"{steps} step{'' if steps == 1 else 's'} recorded"]
    world_size = records.run.world_size if records.run else 1
    ends = {
        rank: line
        for rank, lines in records.worker.items()
        for line in lines
        if line.kind in ("finished", "exception", "invalid")
    }
    failed = next(((rank, line) for rank, line in ends.items() if line.kind != "finished"), None)
    error = None
    if failed is not None:
        rank, line = failed
        parts.append(f"rank {rank} had recorded {line.type or line.kind}: {one_line(line.message or '')}")
        error = RunError(rank=rank, phase=line.phase, type=line.type, message=line.message, chain=line.chain or [])
    elif len(ends) >= world_size:
        parts.append("every rank had recorded that it finished")
    else:
        parts.append("no end was recorded")
    judged = next((e for e in reversed(records.events) if e.kind == "state" and e.state in END_STATES), None)
    if judged is not None:
        parts.append(f"the supervisor's own verdict was {judged.state}: {judged.reason}")
    return Verdict("lost", f"{why}: {'; '.join(parts)}", error)


@contextlib.contextmanager
def _exclusive_lock(directory: Path) -> Iterator[bool]:
    """The run's lock for this reader alone; False when someone else keeps it, longer than another reader would."""
    try:
        fd = open_lock(directory)
    except FileNotFoundError:
        # Without a lock file no process can hold it.
        yield True
        return
    try:
        yield try_exclusive_lock(fd)
    finally:
        os.close(fd)


def _is_still_alive(directory: Path) -> bool:
    """Return True if the lock stays held: two readers that ask at once each see the other's."""
    for _ in range(LOCK_TRIES):
        if not is_alive(directory):
            return False
        time.sleep(LOCK_PAUSE_S)
    return True


def _is_young(directory: Path) -> bool:
    try:
        return time.time() - directory.stat().st_mtime < BEING_MADE_S
    except OSError:
        return False

"""The processes of a run by its records: its supervisor, the training's direct child, and the ranks."""

from __future__ import annotations

import contextlib
from pathlib import Path

from trainfast_runner.machine.processes import Identity, boot_id, has_open, is_running, session_members
from trainfast_runner.records.json_lines import Tail, remaining_records
from trainfast_runner.records.run_directory import EVENTS_FILE, read_run_file
from trainfast_runner.records.run_file import RunFile
from trainfast_runner.records.run_lines import Event
from trainfast_runner.records.run_records import read_worker_lines
from trainfast_runner.records.worker_lines import StartedLine
from trainfast_runner.worker.shared.lock_files import ALIVE_LOCK_FILE

_KINDS_OF_STATE = frozenset(("supervisor", "launched", "state", "stop_requested"))


class StateEvents:
    """The events of a run about its state; a second read takes only new lines."""

    def __init__(self, directory: Path) -> None:
        self._tail = Tail(directory / EVENTS_FILE, Event)
        self._events: list[Event] = []

    def read(self) -> list[Event]:
        """The run's events up to now, oldest first."""
        with contextlib.suppress(OSError):
            self._events += [event for event in remaining_records(self._tail) if event.kind in _KINDS_OF_STATE]
        return self._events


def supervisor_of(directory: Path) -> Identity | None:
    """The run's supervisor if it is running, in this boot of the machine."""
    return recorded_process(read_run_file(directory), "supervisor", StateEvents(directory).read())


def launched_child_of(directory: Path) -> Identity | None:
    """The training's direct child (python, or torchrun) if it is running, in this boot of the machine."""
    return recorded_process(read_run_file(directory), "launched", StateEvents(directory).read())


def running_ranks(directory: Path) -> list[Identity]:
    """The ranks that are running, in this boot of the machine."""
    return [rank for rank in _started_ranks(directory) if is_running(rank)]


def forks_left_by(directory: Path) -> list[Identity]:
    """The running processes that a leader of the run, its direct child or a rank, left in its session when it ended.

    Each holds the run's lock: a process with only the session's number is another program's.
    """
    launched_children = [
        process
        for event in StateEvents(directory).read()
        if event.kind == "launched" and (process := _identity(event)) is not None
    ]
    leaders = [*launched_children, *_started_ranks(directory)] if _this_boot(read_run_file(directory)) else []
    members = {member for leader in leaders if not is_running(leader) for member in session_members(leader)}
    return [member for member in members if has_open(member.pid, directory / ALIVE_LOCK_FILE)]


def _started_ranks(directory: Path) -> list[Identity]:
    """Every rank that recorded its start, in this boot of the machine."""
    if not _this_boot(read_run_file(directory)):
        return []
    return [
        process
        for lines in read_worker_lines(directory).values()
        for line in lines
        if isinstance(line, StartedLine) and (process := _identity(line)) is not None
    ]


def recorded_process(run: RunFile | None, kind: str, events: list[Event]) -> Identity | None:
    """The process of the newest event of this kind, if it is running, in this boot of the machine."""
    if not _this_boot(run):
        return None
    for event in reversed(events):
        if event.kind == kind and (process := _identity(event)) is not None:
            return process if is_running(process) else None
    return None


def _identity(record: Event | StartedLine) -> Identity | None:
    """The process that a record names; None if it lacks the pid or the start."""
    if record.pid is None or record.start_ticks is None:
        return None
    return Identity(record.pid, record.start_ticks)


def _this_boot(run: RunFile | None) -> bool:
    """True if the run's pids are of this boot."""
    return run is not None and run.boot_id in ("", boot_id())

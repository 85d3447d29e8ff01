"""The state of a run directory: live, ended, or left behind by a supervisor that died. Nothing is written here."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from trainfast_runner.errors import UserError
from trainfast_runner.machine.processes import Identity, boot_id, has_open, is_running, session_members
from trainfast_runner.records import run_directory
from trainfast_runner.records.home import Home
from trainfast_runner.records.json_lines import Tail, read_cached, remaining_records
from trainfast_runner.records.run_file import SCHEMA, RunFile
from trainfast_runner.records.run_lines import Event
from trainfast_runner.records.worker_lines import StartedLine
from trainfast_runner.running.slurm import end_reason, job_of, job_state
from trainfast_runner.worker.shared.host import ALIVE_LOCK_FILE, LOCK_PAUSE_S

BEING_MADE_S = 10.0
"""Greatest age of a directory without `run.json` that counts as a run being launched."""
STOP_GRACE_S = 30.0
"""Time between SIGTERM and SIGKILL of a stop."""
LEFT_BEHIND = "the supervisor ended before the run did"


@dataclass(frozen=True)
class RunState:
    """A run at this moment."""

    state: str
    supervised: bool = False
    """False for a run that has ended, and for one that goes on without its supervisor."""
    supervisor_pid: int | None = None
    reason: str | None = None
    stop_deadline_ns: int | None = None
    """Time of SIGKILL after a requested stop (CLOCK_MONOTONIC); None without a request."""

    @property
    def ended(self) -> bool:
        """True if the run is over."""
        return self.state in run_directory.END_STATES


def run_state(directory: Path, run: RunFile | None = None, events: StateEvents | None = None) -> RunState:
    """Return the state of the run: `lost` if it was left behind, with or without the result of `recover_result`.

    `run` is its `run.json`, if the caller has read it; `events` is kept by a caller who asks more than once.
    """
    if (reason := run_directory.unreadable_reason(directory)) is not None:
        return RunState(state="unreadable", reason=reason)
    # `run.json` is read before the lock is tried: a launch takes the lock before it writes `run.json`.
    run = run or run_directory.read_run_file(directory)
    is_being_made = not (directory / run_directory.RUN_FILE).exists() and _is_young(directory)
    result = run_directory.read_result(directory)
    if result is None:
        if (host := other_host(run)) is not None:
            recorded = _recorded_state(host, (events or StateEvents(directory)).read())
            return recorded if run is None or not run.by_slurm else _job_state(directory, recorded)
        if run_directory.is_alive(directory):
            live = _live_state(run or run_directory.read_run_file(directory), events or StateEvents(directory))
            # Two readers that ask at once each see the other's lock.
            if live.supervised or not _is_soon(lambda: not run_directory.is_alive(directory)):
                return live
        # The last holder of the lock may have written the result.
        result = run_directory.read_result(directory)
    if result is not None:
        return RunState(state=result.state, reason=result.reason)
    if is_being_made:
        return RunState(state="starting")
    if is_result_newer(directory):
        return RunState(state="lost", reason="result.json was written by a newer trainfast-tui: update this one")
    if run is None:
        return RunState(state="lost", reason="run.json is missing or unreadable: nothing is known of this run")
    judged = _last_state((events or StateEvents(directory)).read())
    if judged is not None and judged.state in run_directory.END_STATES:
        return RunState(state=judged.state, reason=judged.reason)
    return RunState(state="lost", reason=LEFT_BEHIND)


def is_result_newer(directory: Path) -> bool:
    """True if the unreadable `result.json` is whole, and of a newer schema."""
    versioned = read_cached(directory / run_directory.RESULT_FILE, _Versioned)
    return versioned is not None and versioned.schema > SCHEMA


class _Versioned(msgspec.Struct, frozen=True):
    schema: int = 0


def live_runs(home: Home) -> list[RunFile]:
    """The live runs of this home on this machine, newest first."""
    runs = map(run_directory.read_run_file, home.live_directories())
    return [run for run in runs if run is not None and other_host(run) is None]


def other_host(run: RunFile | None) -> str | None:
    """The name of the machine that a run is on, if it is another that shares the home; None on this one.

    Locks, pids and clocks of another machine mean nothing here. A container has a name of its own and the boot of its
    machine.
    """
    if run is not None and run.by_slurm:
        return "of a Slurm job"
    is_here = run is None or run.host in ("", socket.gethostname()) or run.boot_id == boot_id()
    return None if is_here or run is None else run.host


def unfinished_host(directory: Path, run: RunFile | None) -> str | None:
    """The name of the other machine that a run without an end is on; None for any other run."""
    return None if run_directory.read_result(directory) is not None else other_host(run)


def refuse_left_alone(directory: Path) -> None:
    """Raise UserError for a run that is only looked at: one of another machine without an end, or an unreadable one."""
    if (reason := run_directory.unreadable_reason(directory)) is not None:
        raise UserError(f"{directory.name} is left alone: {reason}", key=directory.name)
    if (host := unfinished_host(directory, run_directory.read_run_file(directory))) is not None:
        cure = f"stop or delete it there, or delete its folder if {host} is gone"
        raise UserError(f"{directory.name} is a run of host {host}: {cure}", key=directory.name)


def _recorded_state(host: str, events: list[Event]) -> RunState:
    """The state of a run of another machine, as it recorded it last."""
    event = _last_state(events)
    state = event.state if event and event.state else "starting"
    is_live = state not in run_directory.END_STATES
    return RunState(state if is_live else "stopping", supervised=True, reason=f"on host {host}, as recorded")


def _job_state(directory: Path, recorded: RunState) -> RunState:
    """The state of a run that is a Slurm job: as recorded while it runs."""
    job = job_of(directory)
    stage = job_state(job) if job is not None else None
    if stage is None:
        return RunState("starting", supervised=True)
    if stage.stage == "pending":
        return RunState("starting", supervised=True, reason=f"queued by Slurm: {stage.reason or stage.state}")
    if stage.stage == "gone" and not _is_soon((directory / run_directory.RESULT_FILE).exists):
        return RunState("lost", reason=end_reason(stage) or "its Slurm job has ended without a result")
    return replace(recorded, reason=f"Slurm job {job}")


def _is_soon(is_so: Callable[[], bool]) -> bool:
    """Return True once it is so, within the time of a slow disk and of other readers; False after it."""
    deadline_s = time.monotonic() + run_directory.READERS_WITHIN_S
    while not (found := is_so()) and time.monotonic() < deadline_s:
        time.sleep(LOCK_PAUSE_S)
    return found


def _live_state(run: RunFile | None, state_events: StateEvents) -> RunState:
    """The state of a run whose lock is held."""
    events = state_events.read()
    supervisor = recorded_process(run, "supervisor", events)
    if supervisor is None:
        # Before its first event there is no supervisor to be missing: the launcher holds the lock.
        if not any(event.kind == "supervisor" for event in events):
            return RunState(state="starting")
        return RunState(state="running", reason="its supervisor is gone; the training goes on without it")
    state = _last_state(events)
    stop = next((event for event in reversed(events) if event.kind == "stop_requested"), None)
    return RunState(
        state=state.state if state and state.state else "starting",
        supervised=True,
        supervisor_pid=supervisor.pid,
        reason=state.reason if state else None,
        stop_deadline_ns=stop.deadline_ns if stop else None,
    )


def _last_state(events: list[Event]) -> Event | None:
    return next((event for event in reversed(events) if event.kind == "state" and event.state), None)


def _is_young(directory: Path) -> bool:
    try:
        return time.time() - directory.stat().st_mtime < BEING_MADE_S
    except OSError:
        return False


_KINDS_OF_STATE = frozenset(("supervisor", "launched", "state", "stop_requested"))


class StateEvents:
    """The events of a run about its state; a second read takes only new lines."""

    def __init__(self, directory: Path) -> None:
        self._tail = Tail(directory / run_directory.EVENTS_FILE, Event)
        self._events: list[Event] = []

    def read(self) -> list[Event]:
        """The run's events up to now, oldest first."""
        with contextlib.suppress(OSError):
            self._events += [event for event in remaining_records(self._tail) if event.kind in _KINDS_OF_STATE]
        return self._events


def recorded_processes(run: RunFile | None, records: Iterable[Event | StartedLine]) -> list[Identity]:
    """The processes that these records of a run name; none of another boot of the machine."""
    if run is None or run.boot_id not in ("", boot_id()):
        return []
    return [
        Identity(record.pid, record.start_ticks)
        for record in records
        if record.pid is not None and record.start_ticks is not None
    ]


def recorded_process(run: RunFile | None, kind: str, events: list[Event]) -> Identity | None:
    """The process of the newest event of this kind, if it is running."""
    processes = recorded_processes(run, (event for event in events if event.kind == kind))
    return processes[-1] if processes and is_running(processes[-1]) else None


def process_of(directory: Path, kind: str) -> Identity | None:
    """The run's `supervisor`, or the direct child that it `launched` (python, or torchrun), if it is running."""
    return recorded_process(run_directory.read_run_file(directory), kind, StateEvents(directory).read())


def _started_ranks(directory: Path) -> list[Identity]:
    """Every rank that recorded its start."""
    lines = (line for lines in run_directory.read_worker_lines(directory).values() for line in lines)
    return recorded_processes(
        run_directory.read_run_file(directory), (line for line in lines if isinstance(line, StartedLine))
    )


def running_ranks(directory: Path) -> list[Identity]:
    """The ranks that are running."""
    return [rank for rank in _started_ranks(directory) if is_running(rank)]


def forks_left_by(directory: Path) -> list[Identity]:
    """The running processes that a leader of the run, its direct child or a rank, left in its session when it ended.

    Each holds the run's lock: a process with only the session's number is another program's.
    """
    launched = (event for event in StateEvents(directory).read() if event.kind == "launched")
    leaders = [*recorded_processes(run_directory.read_run_file(directory), launched), *_started_ranks(directory)]
    members = {member for leader in leaders if not is_running(leader) for member in session_members(leader)}
    return [member for member in members if has_open(member.pid, directory / ALIVE_LOCK_FILE)]

"""Stop a run from another process: signal its supervisor, or without one end its processes by the same ladder."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

from trainfast_runner.errors import UserError
from trainfast_runner.machine.processes import Identity, descendants, is_running, send
from trainfast_runner.records.result import Result
from trainfast_runner.records.run_directory import is_alive
from trainfast_runner.running.present_state import (
    forks_left_by,
    launched_child_of,
    refuse_left_alone,
    run_state,
    running_ranks,
    supervisor_of,
)
from trainfast_runner.running.settling import recover_result

POLL_S = 0.1
"""Chosen, not measured: seconds between two looks at the processes."""
KILLED_WITHIN_S = 10.0
"""Time for killed processes to end before `stop_unsupervised` gives up."""


def request_stop(directory: Path) -> bool:
    """Ask the run to end: its supervisor begins the stop ladder; asking again changes nothing.

    False when the run goes on without a supervisor: `stop_unsupervised` ends it. Raises UserError when it has ended.
    """
    return _signal_supervisor(directory, signal.SIGTERM)


def kill_now(directory: Path) -> bool:
    """Have the supervisor send SIGKILL to every process of the run. Returns and raises as `request_stop`."""
    return _signal_supervisor(directory, signal.SIGUSR1)


def stop_unsupervised(
    directory: Path, grace_s: float, on_tick: Callable[[float], None] = lambda remaining_s: None
) -> Result | None:
    """Stop a run without a supervisor and return its result (`lost`) once all its processes have ended.

    `on_tick` gets the seconds left until SIGKILL, about ten times a second. None when processes remain that this
    user cannot end. Raises UserError when the run has ended, or when it has a supervisor.
    """
    _refuse_ended(directory)
    if supervisor_of(directory) is not None:
        name = directory.name
        raise UserError(f"{name} has a supervisor: stop it with `trainfast-tui stop {name}`", key=name)
    launched_child = launched_child_of(directory)
    ranks = running_ranks(directory)
    asked_first = [*([launched_child] if launched_child is not None else ranks), *forks_left_by(directory)]
    processes = _with_descendants({*asked_first, *ranks})
    for process in asked_first:
        send(process, signal.SIGTERM)
    deadline_s = time.monotonic() + grace_s
    while any(map(is_running, processes)) and (left_s := deadline_s - time.monotonic()) > 0:
        on_tick(left_s)
        time.sleep(min(POLL_S, left_s))
        processes = _with_descendants(processes)
    give_up_s = time.monotonic() + KILLED_WITHIN_S
    while (any(map(is_running, processes)) or is_alive(directory)) and time.monotonic() < give_up_s:
        for process in processes:
            send(process, signal.SIGKILL)
        on_tick(0.0)
        time.sleep(POLL_S)
        processes = _with_descendants(processes)
    return recover_result(directory)


def _with_descendants(processes: set[Identity]) -> set[Identity]:
    """The processes with their present descendants; an orphan has no ancestor left, so it must be known before."""
    return processes | {child for process in processes if is_running(process) for child in descendants(process.pid)}


def _signal_supervisor(directory: Path, signum: int) -> bool:
    refuse_left_alone(directory)
    supervisor = supervisor_of(directory)
    if supervisor is not None and send(supervisor, signum):
        return True
    _refuse_ended(directory)
    return False


def _refuse_ended(directory: Path) -> None:
    state = run_state(directory)
    if state.ended:
        raise UserError(f"{directory.name} is not running: it is {state.state}", key=directory.name)

"""Processes that belong together: below a root, in one session, or started with one variable."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trainfast_runner.machine.processes.identity import Identity, identify
from trainfast_runner.machine.processes.stat import Stat, read_stat, read_threads


@dataclass(frozen=True)
class UnkillableProcess:
    """A process that did not end; `state` is the kernel's letter. State D takes no signal."""

    pid: int
    name: str
    state: str


def descendants(root_pid: int) -> list[Identity]:
    """Every running process below `root_pid`, itself not among them."""
    return [Identity(pid, stat.start_ticks) for pid, stat in processes_below(root_pid) if not stat.ended]


def own_pids() -> set[int]:
    """Pids of this process and of every process below it: for a supervisor, the whole training."""
    return {os.getpid(), *(process.pid for process in descendants(os.getpid()))}


def unended_below(root_pid: int) -> list[UnkillableProcess]:
    """Processes below `root_pid` with a thread that has not ended; without any, the uncollected ones."""
    unkillable = [UnkillableProcess(pid, stat.name, _worst_state(pid, stat)) for pid, stat in processes_below(root_pid)]
    return [process for process in unkillable if process.state != "Z"] or unkillable


def _worst_state(pid: int, stat: Stat) -> str:
    """The state of the thread that keeps the process from ending: its main thread may have ended before."""
    states = [thread.state for thread in read_threads(pid) if not thread.ended]
    return "D" if "D" in states else next(iter(states), stat.state)


def _all_processes() -> Iterator[tuple[int, Stat]]:
    with os.scandir("/proc") as entries:
        for entry in entries:
            if entry.name.isdecimal() and (stat := read_stat(int(entry.name))) is not None:
                yield int(entry.name), stat


def processes_below(root_pid: int) -> list[tuple[int, Stat]]:
    """Every process below `root_pid` by pid, those that wait to be collected among them.

    Raises OSError when files cannot be opened.
    """
    children: dict[int, list[tuple[int, Stat]]] = {}
    for pid, stat in _all_processes():
        children.setdefault(stat.parent_pid, []).append((pid, stat))
    found_descendants: list[tuple[int, Stat]] = []
    parents = [root_pid]
    while parents:
        for pid, stat in children.get(parents.pop(), ()):
            parents.append(pid)
            found_descendants.append((pid, stat))
    return found_descendants


def session_members(leader: Identity) -> list[Identity]:
    """The running processes of the session that `leader` began, which may have ended; empty if its pid was reused.

    While one of them runs, the kernel does not reuse that pid.
    """
    current = identify(leader.pid)
    if current is not None and current != leader:
        return []
    return [
        Identity(pid, stat.start_ticks)
        for pid, stat in _all_processes()
        if stat.session == leader.pid and stat.start_ticks >= leader.start_ticks and not stat.ended
    ]


def started_with(variable: str, value: str) -> list[Identity]:
    """The running processes whose environment began with this variable; those of other users are left out.

    A process that has left its parent, its group and its session still has it.
    """
    assignment = os.fsencode(f"{variable}={value}")
    processes = []
    for pid, stat in _all_processes():
        with suppress(OSError):  # the process ended, or belongs to another user
            if not stat.ended and assignment in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                processes.append(Identity(pid, stat.start_ticks))
    return processes

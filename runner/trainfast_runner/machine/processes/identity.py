"""Processes identified by pid and start time, found below a root, and signalled without mistakes."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trainfast_runner.machine.processes.stat import Stat, read_stat, read_threads

PR_SET_CHILD_SUBREAPER = 36
BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Identity:
    """One process for ever: its pid, and its start in clock ticks since boot (field 22 of `/proc/PID/stat`)."""

    pid: int
    start_ticks: int


@dataclass(frozen=True)
class UnkillableProcess:
    """A process that did not end; `state` is the kernel's letter. State D takes no signal."""

    pid: int
    name: str
    state: str


def identify(pid: int) -> Identity | None:
    """The process with this pid now; None without one, or with only a zombie waiting to be collected."""
    stat = read_stat(pid)
    return None if stat is None or stat.ended else Identity(pid, stat.start_ticks)


def is_running(identity: Identity) -> bool:
    """True if that very process, not a later one with its pid, still runs."""
    return identify(identity.pid) == identity


def send(identity: Identity, signum: int) -> bool:
    """Signal that very process. False when it has ended or belongs to another user."""
    try:
        fd = os.pidfd_open(identity.pid)
    except ProcessLookupError:
        return False
    except OSError:
        # Kernels before 5.3 have no pidfd: a pid could change hands between these two calls, in theory.
        return is_running(identity) and _kill(identity.pid, signum)
    try:
        if not is_running(identity):
            return False
        signal.pidfd_send_signal(fd, signum)
    except (ProcessLookupError, PermissionError):
        return False
    finally:
        os.close(fd)
    return True


def descendants(root_pid: int) -> list[Identity]:
    """Every running process below `root_pid`, itself not among them."""
    return [Identity(pid, stat.start_ticks) for pid, stat in below(root_pid) if not stat.ended]


def unended(root_pid: int) -> list[UnkillableProcess]:
    """Processes below `root_pid` with a thread that has not ended; without any, the uncollected ones."""
    unkillable = [UnkillableProcess(pid, stat.name, _worst_state(pid, stat)) for pid, stat in below(root_pid)]
    return [process for process in unkillable if process.state != "Z"] or unkillable


def _worst_state(pid: int, stat: Stat) -> str:
    """The state of the thread that keeps the process from ending: its main thread may have ended before."""
    states = [thread.state for thread in read_threads(pid) if not thread.ended]
    return "D" if "D" in states else next(iter(states), stat.state)


def _all() -> Iterator[tuple[int, Stat]]:
    with os.scandir("/proc") as entries:
        for entry in entries:
            if entry.name.isdecimal() and (stat := read_stat(int(entry.name))) is not None:
                yield int(entry.name), stat


def below(root_pid: int) -> list[tuple[int, Stat]]:
    """Every process below `root_pid` by pid, those that wait to be collected among them.

    Raises OSError when files cannot be opened.
    """
    children: dict[int, list[tuple[int, Stat]]] = {}
    for pid, stat in _all():
        children.setdefault(stat.parent_pid, []).append((pid, stat))
    descendants: list[tuple[int, Stat]] = []
    parents = [root_pid]
    while parents:
        for pid, stat in children.get(parents.pop(), ()):
            parents.append(pid)
            descendants.append((pid, stat))
    return descendants


def session_members(leader: Identity) -> list[Identity]:
    """The running processes of the session that `leader` began, which may have ended; empty if its pid was reused.

    While one of them runs, the kernel does not reuse that pid.
    """
    now = identify(leader.pid)
    if now is not None and now != leader:
        return []
    return [
        Identity(pid, stat.start_ticks)
        for pid, stat in _all()
        if stat.session == leader.pid and stat.start_ticks >= leader.start_ticks and not stat.ended
    ]


def started_with(variable: str, value: str) -> list[Identity]:
    """The running processes whose environment began with this variable; those of other users are left out.

    A process that has left its parent, its group and its session still has it.
    """
    wanted = os.fsencode(f"{variable}={value}")
    processes = []
    for pid, stat in _all():
        with suppress(OSError):  # it ended, or belongs to another user
            if not stat.ended and wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                processes.append(Identity(pid, stat.start_ticks))
    return processes


def has_open(pid: int, path: Path) -> bool:
    """True if a process has the file open; False for a process that this user may not look at."""
    with suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):  # closed meanwhile
                if os.path.samefile(f"/proc/{pid}/fd/{fd}", path):
                    return True
    return False


def reap_when_ended(process: subprocess.Popen[bytes]) -> None:
    """Collect a child whenever it ends, for a caller that does not wait for it; `process` may still be polled."""
    threading.Thread(target=process.wait, name=f"wait for {process.pid}", daemon=True).start()


def become_subreaper() -> bool:
    """Make orphans below this process its own children, however they detached. False when Linux refuses."""
    libc = ctypes.CDLL(None, use_errno=True)
    return int(libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)) == 0


def boot_id() -> str:
    """Names this boot of the machine: pids and monotonic times of another boot mean nothing."""
    try:
        return BOOT_ID_FILE.read_text().strip()
    except OSError:
        return ""


def _kill(pid: int, signum: int) -> bool:
    try:
        os.kill(pid, signum)
    except (ProcessLookupError, PermissionError):
        return False
    return True

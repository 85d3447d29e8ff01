"""Processes as the kernel knows them: told apart by start time, found below a root, signalled without mistakes."""

from __future__ import annotations

import ctypes
import os
import signal
from dataclasses import dataclass
from pathlib import Path

from trainfast_runner.telemetry.process_stat import Stat, read_stat

PR_SET_CHILD_SUBREAPER = 36
BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Identity:
    """One process for ever: its pid, and its start in clock ticks since boot (field 22 of `/proc/PID/stat`)."""

    pid: int
    start_ticks: int


def identify(pid: int) -> Identity | None:
    """Who has this pid now; None when nobody has, or only a zombie waiting to be collected."""
    stat = read_stat(pid)
    return None if stat is None or stat.ended else Identity(pid, stat.start_ticks)


def is_running(identity: Identity) -> bool:
    """Whether that very process, and not a later one with its pid, still runs."""
    return identify(identity.pid) == identity


def send(identity: Identity, signum: int) -> bool:
    """Signal that very process. False when it has ended or belongs to somebody else."""
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
    children: dict[int, list[tuple[int, Stat]]] = {}
    with os.scandir("/proc") as entries:
        for entry in entries:
            if entry.name.isdecimal() and (stat := read_stat(int(entry.name))) is not None:
                children.setdefault(stat.parent_pid, []).append((int(entry.name), stat))
    found: list[Identity] = []
    parents = [root_pid]
    while parents:
        for pid, stat in children.get(parents.pop(), ()):
            parents.append(pid)
            if not stat.ended:
                found.append(Identity(pid, stat.start_ticks))
    return found


def become_subreaper() -> bool:
    """Make orphans below this process its own children, however they detached. False where Linux refuses."""
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

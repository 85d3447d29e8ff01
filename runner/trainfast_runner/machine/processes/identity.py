"""One process, identified by pid and start time, so that no later process with its pid is taken for it."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trainfast_runner.machine.processes.stat import read_stat

BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")
INITIAL_PID_NAMESPACE = "pid:[4026531836]"
"""PROC_PID_INIT_INO of the kernel's proc_ns.h: the content of /proc/self/ns/pid outside of every container."""


@dataclass(frozen=True)
class Identity:
    """One process, told apart from later ones with its pid by its start.

    `start_ticks` are clock ticks since boot (field 22 of `/proc/PID/stat`).
    """

    pid: int
    start_ticks: int


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


def has_open(pid: int, path: Path) -> bool:
    """True if a process has the file open; False for a process that this user may not look at."""
    with suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):  # closed meanwhile
                if os.path.samefile(f"/proc/{pid}/fd/{fd}", path):
                    return True
    return False


def boot_id() -> str:
    """The id of this boot of the machine, empty if unknown; pids and monotonic times of another boot mean nothing."""
    try:
        return BOOT_ID_FILE.read_text().strip()
    except OSError:
        return ""


def sees_host_pids(namespace: Path = Path("/proc/self/ns/pid")) -> bool:
    """True if process ids here are the host's, which the driver lists."""
    try:
        return os.readlink(namespace) == INITIAL_PID_NAMESPACE
    except OSError:
        return False


def _kill(pid: int, signum: int) -> bool:
    try:
        os.kill(pid, signum)
    except (ProcessLookupError, PermissionError):
        return False
    return True

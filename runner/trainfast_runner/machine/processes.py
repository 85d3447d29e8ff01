"""Processes of this machine: their fields, identity and families, the children of this one, and signals.

Fields come from `/proc/PID/stat` (proc_pid_stat(5)). psutil gives start times in seconds since 1970; records name a
process by its start in clock ticks. psutil also takes 87 to 135 µs a process for these fields, this 14 to 22: 6 to
10 ms a tick less for a run of 72 processes.
"""

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

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGESIZE")
BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")
INITIAL_PID_NAMESPACE = "pid:[4026531836]"
"""PROC_PID_INIT_INO of the kernel's proc_ns.h: the content of /proc/self/ns/pid outside of every container."""
PR_SET_CHILD_SUBREAPER = 36
"""The option of prctl(2), from the kernel's prctl.h."""


@dataclass(frozen=True, slots=True)
class Stat:
    """Fields of `/proc/PID/stat`."""

    state: str
    """The kernel's letter: R runs, S sleeps, D sleeps and takes no signal, Z has ended."""
    parent_pid: int
    session: int
    start_ticks: int
    """Clock ticks since boot."""
    cpu_s: float
    """Seconds of processor time."""
    threads: int
    memory_rss_bytes: int
    name: str

    @property
    def ended(self) -> bool:
        """True if the process only waits to be collected."""
        return self.state in "ZXx"


def read_stat(pid: int) -> Stat | None:
    """The process's fields; None when it does not exist or is hidden. Raises OSError when files cannot be opened."""
    return _read_stat(f"{pid}/stat")


def read_threads(pid: int) -> list[Stat]:
    """The threads of a process, the main one first; empty when the process does not exist."""
    try:
        threads = sorted(os.listdir(f"/proc/{pid}/task"), key=int)
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return []
    return [stat for thread in threads if (stat := _read_stat(f"{pid}/task/{thread}/stat")) is not None]


def read_storage_bytes(pid: int) -> tuple[int, int] | None:
    """Bytes read from and written to storage; None for an ended or foreign process, or without kernel accounting."""
    try:
        counters = dict(line.split(b": ") for line in read_proc(f"{pid}/io").splitlines())
        return int(counters[b"read_bytes"]), int(counters[b"write_bytes"])
    except (OSError, LookupError, ValueError):
        return None


def _read_stat(name: str) -> Stat | None:
    try:
        text = read_proc(name)
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    # The name in parentheses may hold spaces and parentheses itself: count fields from the last one.
    head, _, after_name = text.rpartition(b")")
    fields = after_name.split(None, 22)
    return Stat(
        state=fields[0].decode(),
        parent_pid=int(fields[1]),
        session=int(fields[3]),
        start_ticks=int(fields[19]),
        cpu_s=(int(fields[11]) + int(fields[12])) / TICKS_PER_S,
        threads=int(fields[17]),
        memory_rss_bytes=int(fields[21]) * _PAGE_BYTES,
        name=head.partition(b"(")[2].decode(errors="replace"),
    )


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


def reap_when_ended(process: subprocess.Popen[bytes]) -> None:
    """Collect a child whenever it ends, for a caller that does not wait for it; `process` may still be polled."""
    threading.Thread(target=process.wait, name=f"wait for {process.pid}", daemon=True).start()


def become_subreaper() -> bool:
    """Make orphans below this process its own children, however they detached. False when Linux refuses."""
    libc = ctypes.CDLL(None, use_errno=True)
    return int(libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)) == 0


def collect_orphans() -> bool:
    """Collect every ended child; True if any child is left. Only after the direct child's own status is kept."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == 0:
            return True


_MOST_BYTES = 1 << 12
"""More than any `stat` or `io` has; the kernel gives it in one piece."""


def read_proc(name: str) -> bytes:
    """Return the content of `/proc/NAME`, a small file. Raises OSError."""
    fd = os.open(f"/proc/{name}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, _MOST_BYTES)
    finally:
        os.close(fd)

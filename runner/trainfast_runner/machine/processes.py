"""Processes of this machine: their fields, identity and families, signals, and the list of those that use the machine.

Fields come from `/proc/PID/stat` (proc_pid_stat(5)). psutil gives start times in seconds since 1970; records name a
process by its start in clock ticks. psutil also takes 87 to 135 µs a process for these fields, this 14 to 22: 6 to
10 ms a tick less for a run of 72 processes.
"""

from __future__ import annotations

import ctypes
import heapq
import os
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from trainfast_runner.records.json_lines import text_of
from trainfast_runner.records.run_lines import UnendedProcess
from trainfast_runner.records.tick import DeviceReading

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
    return _read_stat(f"/proc/{pid}/stat")


_MOST_BYTES = 1 << 12
"""More than any `stat` has; the kernel gives it in one piece."""


def _read_stat(path: str) -> Stat | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            text = os.read(fd, _MOST_BYTES)
        finally:
            os.close(fd)
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
    # A pid could change hands between these two calls, in theory.
    if not is_running(identity):
        return False
    try:
        os.kill(identity.pid, signum)
    except (ProcessLookupError, PermissionError):
        return False
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
    return text_of(BOOT_ID_FILE).strip()


def sees_host_pids(namespace: Path = Path("/proc/self/ns/pid")) -> bool:
    """True if process ids here are the host's, which the driver lists."""
    try:
        return os.readlink(namespace) == INITIAL_PID_NAMESPACE
    except OSError:
        return False


def descendants(root_pid: int) -> list[Identity]:
    """Every running process below `root_pid`, itself not among them."""
    below = processes_below([root_pid], psutil.pids())
    return [Identity(pid, stat.start_ticks) for pid, stat in below.items() if not stat.ended]


def own_pids() -> set[int]:
    """Pids of this process and of every process below it: for a supervisor, the whole training."""
    return {os.getpid(), *(process.pid for process in descendants(os.getpid()))}


def unended_below(root_pid: int) -> list[UnendedProcess]:
    """Processes below `root_pid` with a thread that has not ended; without any, the uncollected ones."""
    below = processes_below([root_pid], psutil.pids())
    unended = [UnendedProcess(pid, stat.name, _worst_state(pid, stat)) for pid, stat in below.items()]
    return [process for process in unended if process.state != "Z"] or unended


def _worst_state(pid: int, stat: Stat) -> str:
    """The state of the thread that keeps the process from ending: its main thread may have ended before."""
    with suppress(OSError):
        threads = [_read_stat(f"/proc/{pid}/task/{thread}/stat") for thread in os.listdir(f"/proc/{pid}/task")]
        states = [thread.state for thread in threads if thread is not None and not thread.ended]
        return "D" if "D" in states else next(iter(states), stat.state)
    return stat.state


def _stats(pids: Iterable[int]) -> Iterator[tuple[int, Stat]]:
    return ((pid, stat) for pid in pids if (stat := read_stat(pid)) is not None)


def processes_below(root_pids: Iterable[int], among: Iterable[int]) -> dict[int, Stat]:
    """Every process of `among` below one of the roots by pid, those that wait to be collected among them.

    Raises OSError when files cannot be opened.
    """
    children: dict[int, list[tuple[int, Stat]]] = {}
    for pid, stat in _stats(among):
        children.setdefault(stat.parent_pid, []).append((pid, stat))
    below: dict[int, Stat] = {}
    parents = [*root_pids]
    while parents:
        found = children.pop(parents.pop(), [])
        parents += [pid for pid, _ in found]
        below.update(found)
    return below


def session_members(leader: Identity) -> list[Identity]:
    """The running processes of the session that `leader` began, which may have ended; empty if its pid was reused.

    While one of them runs, the kernel does not reuse that pid.
    """
    current = identify(leader.pid)
    if current is not None and current != leader:
        return []
    return [
        Identity(pid, stat.start_ticks)
        for pid, stat in _stats(psutil.pids())
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


KERNEL_THREADS_PARENT = 2
MIN_CPU_PERCENT = 1.0
MIN_RSS_BYTES = 32 << 20
"""Least memory, and least CPU percent, of a listed process that holds no GPU: one of the two is enough."""
SCAN_EVERY_S = 2.0
SCAN_SHARE = 0.01
"""Share of a core that looking at all processes may take."""
MAX_ROWS = 200
"""The most processes in a list."""
COMMAND_CHARACTERS = 4096
"""The beginning of a command line that is kept: more than a screen shows."""


@dataclass(frozen=True, slots=True)
class ProcessRow:
    """One process. `identity` is None when it cannot be seen from here, as from inside a container."""

    pid: int
    identity: Identity | None = None
    owner: str | None = None
    is_own: bool = False
    """True if the process belongs to this user."""
    command: str = ""
    """The command line, untrusted text."""
    cpu_percent: float | None = None
    """100 is one core kept busy; None until it was seen twice."""
    memory_rss_bytes: int | None = None
    age_s: float | None = None
    devices: tuple[tuple[int, int | None], ...] = ()
    """The GPUs on which the process has a context, by index, with the bytes held there."""

    @property
    def device_memory_bytes(self) -> int | None:
        """Bytes held on all GPUs together; None when the driver does not list them."""
        readings = [used_bytes for _, used_bytes in self.devices if used_bytes is not None]
        return sum(readings) if readings else None


class ProcessList:
    """Reads /proc every few seconds; use it from one thread."""

    def __init__(self) -> None:
        self._pids_are_ours = sees_host_pids()
        """True if the driver lists ids as in /proc."""
        self._cpu_s: dict[Identity, float] = {}
        """The processor time of each process at the last scan."""
        self._scanned_s = 0.0
        self._rows: dict[int, ProcessRow] = {}
        self._next_scan_s = 0.0
        self._looked_for: frozenset[int] = frozenset()
        """Processes on GPUs that the last scan looked for; those it did not find are hidden, or have ended."""

    def read(self, devices: Sequence[DeviceReading]) -> tuple[ProcessRow, ...]:
        """The processes on the GPUs of a tick, and those that keep the host busy or fill its memory."""
        devices_by_pid: dict[int, list[tuple[int, int | None]]] = {}
        for device in devices:
            for process in device.processes or ():
                devices_by_pid.setdefault(process.pid, []).append((device.index, process.memory_used_bytes))
        began_s = time.monotonic()
        if began_s >= self._next_scan_s or (self._pids_are_ours and not devices_by_pid.keys() <= self._looked_for):
            self._looked_for = frozenset(devices_by_pid) if self._pids_are_ours else frozenset()
            self._scan(self._looked_for)
            self._next_scan_s = began_s + max(SCAN_EVERY_S, (time.monotonic() - began_s) / SCAN_SHARE)
        # In a container the driver's id may be that of an unrelated process here: both are listed.
        scanned = self._rows if self._pids_are_ours else {}
        on_gpus = [replace(scanned.get(pid) or ProcessRow(pid), devices=(*on,)) for pid, on in devices_by_pid.items()]
        rest = (row for pid, row in self._rows.items() if not (pid in scanned and pid in devices_by_pid))
        # A driver may list thousands; those that hold most are the ones a person looks for.
        rows = (*rest, *on_gpus)
        return rows if len(rows) <= MAX_ROWS else tuple(heapq.nlargest(MAX_ROWS, rows, key=_weight))

    def _scan(self, gpu_pids: frozenset[int]) -> None:
        now_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        since_s, self._scanned_s = now_s - self._scanned_s, now_s
        cpu_s_before, self._cpu_s = self._cpu_s, {}
        self._rows = {}
        for pid, stat in _stats(psutil.pids()):
            if stat.ended or KERNEL_THREADS_PARENT in (pid, stat.parent_pid):
                continue
            identity = Identity(pid, stat.start_ticks)
            self._cpu_s[identity] = stat.cpu_s
            before_s = cpu_s_before.get(identity)
            cpu_percent = None if before_s is None or since_s <= 0 else 100 * (stat.cpu_s - before_s) / since_s
            rss_bytes = stat.memory_rss_bytes
            if pid in gpu_pids or rss_bytes >= MIN_RSS_BYTES or (cpu_percent or 0) >= MIN_CPU_PERCENT:
                owner, is_own = owner_of(pid) or (None, False)
                command = command_line(pid) or f"[{stat.name}]"
                age_s = max(0.0, now_s - stat.start_ticks / TICKS_PER_S)
                self._rows[pid] = ProcessRow(pid, identity, owner, is_own, command, cpu_percent, rss_bytes, age_s)


def _weight(row: ProcessRow) -> tuple[bool, int, float, int]:
    device_bytes = row.device_memory_bytes or 0
    return (bool(row.devices), device_bytes, row.cpu_percent or 0.0, row.memory_rss_bytes or 0)


def owner_of(pid: int) -> tuple[str, bool] | None:
    """The name of a process's owner, and True if that is this user; None when it has ended or is hidden."""
    try:
        process = psutil.Process(pid)
        return process.username(), int(process.uids().real) == os.getuid()
    except psutil.Error:
        return None


def command_line(pid: int) -> str:
    """The command line, joined by spaces; empty when the process has ended or is hidden."""
    try:
        return " ".join(psutil.Process(pid).cmdline())[:COMMAND_CHARACTERS]
    except psutil.Error:
        return ""

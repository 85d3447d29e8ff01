"""Resources that one run's processes use: the root process and all its descendants, summed."""

from __future__ import annotations

import time
from dataclasses import dataclass

import psutil

from trainfast_runner.machine.processes import Stat, read_stat, read_storage_bytes
from trainfast_runner.records.tick import RunReading

SEARCH_EVERY = 3
"""Ticks between two searches for new descendants, which list all of /proc; also between two readings of the storage
counters, which are in a file for each process."""
_ALL_AGAIN_EVERY = 20
"""Searches between two that read every process: meanwhile a known pid may have passed to a new process."""


@dataclass
class _Member:
    """A process of the tree, its processor time and its last storage counters (None when the system gives none)."""

    start_ticks: int
    cpu_s: float
    storage: tuple[int, int] | None = None


class ProcessTree:
    """Follows a process tree. A process that was a descendant once stays in the tree until it ends.

    Ranks whose launcher died are adopted by another process, and still belong to the run.
    """

    def __init__(self, root_pid: int) -> None:
        self.root_pid = root_pid
        self._ticks = 0
        self._members: dict[int, _Member] = {}
        self._seen_pids: set[int] = set()
        """Every pid of the last search, whose parents need no second look."""
        self._read_s: float | None = None
        self._ended_read_bytes = 0
        self._ended_write_bytes = 0
        root = read_stat(root_pid)
        if root is not None and not root.ended:
            self._add(root_pid, root)

    def read(self) -> RunReading | None:
        """The sums at this moment; None once no process is left. The first has no `cpu_percent`.

        Raises OSError when files cannot be opened.
        """
        turn = self._ticks % SEARCH_EVERY
        if turn == 0:
            self._search(everyone=self._ticks % (SEARCH_EVERY * _ALL_AGAIN_EVERY) == 0)
        storage_due = turn == SEARCH_EVERY // 2
        self._ticks += 1
        now_s = time.monotonic()
        before_s, self._read_s = self._read_s, now_s
        cpu_s, rss_bytes, threads = 0.0, 0, 0
        for pid, member in list(self._members.items()):
            stat = read_stat(pid)
            if stat is None or stat.ended or stat.start_ticks != member.start_ticks:
                # A zombie uses nothing, and the pid may have passed to another process.
                self._retire(pid)
                continue
            cpu_s += stat.cpu_s - member.cpu_s
            member.cpu_s = stat.cpu_s
            rss_bytes += stat.memory_rss_bytes
            threads += stat.threads
            if storage_due or member.storage is None:
                # A process that just ended keeps its last counters.
                member.storage = read_storage_bytes(pid) or member.storage
        if not self._members:
            return None
        storage = [member.storage for member in self._members.values() if member.storage is not None]
        return RunReading(
            cpu_percent=None if before_s is None else round(100 * cpu_s / (now_s - before_s), 1),
            memory_rss_bytes=rss_bytes,
            read_bytes=self._ended_read_bytes + sum(read for read, _ in storage) if storage else None,
            write_bytes=self._ended_write_bytes + sum(written for _, written in storage) if storage else None,
            processes=len(self._members),
            threads=threads,
        )

    def _search(self, *, everyone: bool) -> None:
        """Add new descendants, reading `everyone` or only the processes that the last search did not see."""
        pids = set(psutil.pids())
        unseen = pids if everyone else pids - self._seen_pids
        self._seen_pids = pids
        children: dict[int, list[tuple[int, Stat]]] = {}
        for pid in unseen:
            if (stat := read_stat(pid)) is not None and not stat.ended:
                children.setdefault(stat.parent_pid, []).append((pid, stat))
        # Start from every member: processes below an adopted rank are no longer below the root.
        parents = list(self._members)
        while parents:
            for pid, stat in children.get(parents.pop(), ()):
                if pid not in self._members:
                    self._add(pid, stat)
                    parents.append(pid)

    def _add(self, pid: int, stat: Stat) -> None:
        self._members[pid] = _Member(stat.start_ticks, stat.cpu_s)

    def _retire(self, pid: int) -> None:
        read, written = self._members.pop(pid).storage or (0, 0)
        self._ended_read_bytes += read
        self._ended_write_bytes += written

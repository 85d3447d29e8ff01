"""What one run's processes use: the root process and everything that descends from it, summed."""

from dataclasses import dataclass

import psutil

from trainfast_runner.telemetry.readings import RunReading


@dataclass
class _Member:
    """A process of the tree and its last storage counters (None when the system does not give them)."""

    process: psutil.Process
    read_bytes: int | None = None
    write_bytes: int | None = None


class ProcessTree:
    """Follows a process tree. A process that was a descendant once stays in it until it ends.

    Ranks whose launcher died are adopted by another process, and still belong to the run.
    """

    def __init__(self, root_pid: int, *, search_every: int = 3) -> None:
        """`search_every`: ticks between two searches for new descendants, which read all of /proc."""
        self.root_pid = root_pid
        self._search_every = search_every
        self._ticks = 0
        self._members: dict[int, _Member] = {}
        self._ended_read_bytes = 0
        self._ended_write_bytes = 0
        try:
            self._members[root_pid] = _Member(psutil.Process(root_pid))
        except psutil.NoSuchProcess:
            # Ended before anyone looked: `read` answers None.
            return

    def read(self) -> RunReading | None:
        """The sums at this moment; None once no process is left. The first has no `cpu_percent`."""
        first = self._ticks == 0
        if self._ticks % self._search_every == 0:
            self._search()
        self._ticks += 1
        cpu_percent, rss_bytes, processes, threads, readable = 0.0, 0, 0, 0, True
        for pid, member in list(self._members.items()):
            try:
                with member.process.oneshot():
                    cpu_percent += member.process.cpu_percent()
                    rss_bytes += member.process.memory_info().rss
                    threads += member.process.num_threads()
                processes += 1
            except psutil.NoSuchProcess:
                # A zombie counts as ended too: it holds nothing any more.
                self._retire(pid)
                continue
            except psutil.AccessDenied:
                processes += 1
                readable = False
                continue
            _read_storage(member)
        if not processes:
            return None
        storage = [member for member in self._members.values() if member.read_bytes is not None]
        return RunReading(
            cpu_percent=round(cpu_percent, 1) if readable and not first else None,
            memory_rss_bytes=rss_bytes if readable else None,
            read_bytes=self._ended_read_bytes + sum(m.read_bytes or 0 for m in storage) if storage else None,
            write_bytes=self._ended_write_bytes + sum(m.write_bytes or 0 for m in storage) if storage else None,
            processes=processes,
            threads=threads,
        )

    def _search(self) -> None:
        """Adds descendants that are new, and drops members whose pid now belongs to someone else."""
        for pid, member in list(self._members.items()):
            if not member.process.is_running():
                self._retire(pid)
        children: dict[int, list[psutil.Process]] = {}
        for process in psutil.process_iter(["ppid"]):
            children.setdefault(process.info["ppid"], []).append(process)
        # Every member is a start: below an adopted rank are processes that the root no longer leads to.
        parents = list(self._members)
        while parents:
            for process in children.get(parents.pop(), ()):
                if process.pid not in self._members:
                    self._members[process.pid] = _Member(process)
                    parents.append(process.pid)

    def _retire(self, pid: int) -> None:
        member = self._members.pop(pid)
        self._ended_read_bytes += member.read_bytes or 0
        self._ended_write_bytes += member.write_bytes or 0


def _read_storage(member: _Member) -> None:
    try:
        counters = member.process.io_counters()
    except (psutil.Error, OSError):
        # Not given for other users' processes; a process that just ended keeps its last counters.
        return
    member.read_bytes, member.write_bytes = counters.read_bytes, counters.write_bytes

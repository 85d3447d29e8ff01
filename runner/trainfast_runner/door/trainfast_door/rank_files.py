"""The files of one rank in the run directory, and which process writes them."""

from __future__ import annotations

import fcntl
import os
import sys
import time
from typing import Any

from .notes import LineFile, never_raises, note


class RankFiles:
    """`steps.jsonl` and `worker.jsonl` of this process's rank.

    The first process of a rank that takes a step records it; loader workers, launchers and grandchildren stay silent.
    """

    def __init__(self, directory: str, steps_from_log: bool) -> None:
        """`steps_from_log`: the supervisor counts steps in the output; no process records any."""
        self.directory = directory
        self.rank = int(os.environ.get("RANK") or 0)
        self.world_size = int(os.environ.get("WORLD_SIZE") or 1)
        self.is_claimed = steps_from_log
        """True if a process records this rank, or if no process is to."""
        self.are_ours = False
        """True if this process records the rank; False in a process forked from this one."""
        self._worker: LineFile | None = None

    def claim(self) -> LineFile | None:
        """Claim this rank and return its new step file; None if another process records the rank or has recorded it."""
        group = sys.modules.get("torch.distributed")
        if group is not None and group.is_available() and group.is_initialized():
            # A script that spawns its ranks itself names none in the environment.
            self.rank, self.world_size = group.get_rank(), group.get_world_size()
        try:
            steps = LineFile(self.directory, f"steps{self._suffix()}.jsonl", os.O_EXCL)
        except FileExistsError:
            self.is_claimed = True
            note(f"rank {self.rank}: another process takes steps too; only the first one's are recorded")
            return None
        self.is_claimed = self.are_ours = True
        os.register_at_fork(after_in_child=self._leave)
        # Held for the life of this process: a reader that can lock it exclusively knows that the run is over.
        lock = os.open(os.path.join(self.directory, "alive.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_SH)
        never_raises(self.write)("started", pid=os.getpid(), start_ticks=_start_ticks())
        return steps

    def _leave(self) -> None:
        """Record nothing in a process that was forked from this rank's."""
        self.are_ours = False

    def write(self, kind: str, **fields: Any) -> None:
        """Append a line to `worker.jsonl` of this rank."""
        if self._worker is None:
            self._worker = LineFile(self.directory, f"worker{self._suffix()}.jsonl")
        self._worker.write({"t_ns": time.monotonic_ns(), "kind": kind, "rank": self.rank, **fields})

    def _suffix(self) -> str:
        """Part of this rank's file names: empty for rank 0, else `.rank1` and so on."""
        return "" if self.rank == 0 else f".rank{self.rank}"


def _start_ticks() -> int:
    """Start time of this process in clock ticks since boot (field 22 of `/proc/self/stat`), which tells pids apart."""
    with open("/proc/self/stat") as file:
        return int(file.read().rpartition(")")[2].split()[19])

"""Files of a run read as they grow; one that is missing or unreadable has nothing new."""

from __future__ import annotations

import os
from collections import deque
from itertools import chain
from pathlib import Path
from typing import Any, Generic, TypeVar

from trainfast_runner.records.json_lines import Tail
from trainfast_runner.records.regular_files import open_regular
from trainfast_runner.records.run_directory import rank_files
from trainfast_runner.records.run_lines import Step
from trainfast_runner.records.step_lines import StepTail
from trainfast_runner.records.worker_lines import WorkerLine, WorkerTail

T = TypeVar("T")

RECENT_BYTES = 4 << 20
"""The end of a longer file that is read: more than is kept."""


class RecentRecords(Generic[T]):
    """Follow a file from at most `recent_bytes` before its end, and keep its newest `keep` records."""

    def __init__(self, tail: Tail[T], keep: int, recent_bytes: int = RECENT_BYTES) -> None:
        self.kept: deque[T] = deque(maxlen=keep)
        self._tail = _at_recent_end(tail, recent_bytes)

    @property
    def unreadable_lines(self) -> int:
        """Number of lines that could not be read so far."""
        return self._tail.unreadable

    def read(self) -> list[T]:
        """Return the new records, after adding them to those kept."""
        records = new_records(self._tail)
        self.kept.extend(records)
        return records


class RankTails:
    """Follows the files of every rank, also of ranks that come up later."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._steps: dict[int, Tail[Step]] = {}
        self._lines: dict[int, WorkerTail] = {}
        self._last_step_ns: dict[int, int] = {}

    @property
    def unreadable_lines(self) -> int:
        """Number of lines that could not be read so far."""
        tails: chain[Tail[Any]] = chain(self._steps.values(), self._lines.values())
        return sum(tail.unreadable for tail in tails)

    def new_steps(self) -> dict[int, list[Step]]:
        """The new steps of each rank that has any."""
        for rank, path in rank_files(self._directory, "steps").items():
            if rank not in self._steps:
                self._steps[rank] = _at_recent_end(StepTail(path), RECENT_BYTES)
        new_steps = {}
        for rank, tail in self._steps.items():
            # Once the cap has cut the file it is read from its start again.
            steps = [step for step in new_records(tail) if step.t_ns > self._last_step_ns.get(rank, -1)]
            if steps:
                self._last_step_ns[rank] = steps[-1].t_ns
                new_steps[rank] = steps
        return new_steps

    def new_lines(self) -> list[tuple[int, WorkerLine]]:
        """The new lines of all ranks, each with its rank."""
        for rank, path in rank_files(self._directory, "worker").items():
            if rank not in self._lines:
                self._lines[rank] = WorkerTail(path)
        return [(rank, line) for rank, tail in self._lines.items() for line in new_records(tail)]


def new_records(tail: Tail[T]) -> list[T]:
    """The new records of a file; empty if it cannot be read."""
    try:
        return tail.new()
    except OSError:
        return []


def _at_recent_end(tail: Tail[T], recent_bytes: int) -> Tail[T]:
    """The tail, set to start at a line near the end where its file is longer than `recent_bytes`."""
    try:
        with os.fdopen(open_regular(tail.path), "rb") as file:
            size = file.seek(0, os.SEEK_END)
            if size > recent_bytes:
                file.seek(size - recent_bytes)
                file.readline()
                tail.offset = file.tell()
    except OSError:
        pass  # the file is not there yet: the tail waits for it
    return tail

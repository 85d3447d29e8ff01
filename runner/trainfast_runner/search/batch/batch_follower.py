"""Follow a batch search through its journal: a snapshot at each poll, for a screen."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from trainfast_runner.records.json_lines import newest
from trainfast_runner.search.journal.batch import (
    BatchAnswer,
    BatchEnded,
    BatchJournal,
    BatchLaunched,
    BatchLine,
    BatchStep,
    ConfirmationRun,
    Probe,
)
from trainfast_runner.search.journal.fitted_memory import MemoryFit
from trainfast_runner.search.journal.followed_journal import FollowedJournal, SearchSnapshot, state_of_search
from trainfast_runner.search.journal.lines import (
    Conducted,
    Paused,
    Resumed,
    Waiting,
)


@dataclass(frozen=True)
class BatchSnapshot(BatchJournal, SearchSnapshot):
    """The state of a batch search at one moment, and its journal's lines so far."""

    unreadable_lines: int

    @cached_property
    def is_decided(self) -> bool:
        """False if the newest step is done and the next is not decided yet."""
        steps = (line for line in reversed(self.lines) if isinstance(line, BatchStep | Probe | ConfirmationRun))
        return isinstance(next(steps, None), BatchStep | None)

    @property
    def memory_fits(self) -> tuple[MemoryFit, ...]:
        """The newest fits, one for each rank; empty before the first probe."""
        return () if self._fitted_step is None else tuple(self._fitted_step.memory_fits)

    @cached_property
    def tightest_fit(self) -> MemoryFit | None:
        """The newest fit of the rank with the least memory left; None before the first probe."""
        if self._fitted_step is None:
            return None
        rank = self._fitted_step.tightest_rank if self.answer is None else self.answer.tightest_rank
        return next((fit for fit in self.memory_fits if fit.rank == rank), self.memory_fits[0])

    @cached_property
    def _fitted_step(self) -> BatchStep | None:
        """The newest step that was decided by a fit."""
        return next((line for line in reversed(self.lines) if isinstance(line, BatchStep) and line.memory_fits), None)

    @cached_property
    def run_id(self) -> str | None:
        """The search's current run; None between conductors and after the end."""
        last_line = next(
            (line for line in reversed(self.lines) if isinstance(line, BatchLaunched | Conducted | BatchEnded)), None
        )
        return last_line.run_id if isinstance(last_line, BatchLaunched) else None

    @cached_property
    def since_ns(self) -> int | None:
        """CLOCK_MONOTONIC when the current step or wait began; before the first step, when the conductor began."""
        starts = BatchStep | Conducted | Paused | Waiting | Resumed
        return next((line.t_ns for line in reversed(self.lines) if isinstance(line, starts)), None)

    @cached_property
    def confirmation_steps(self) -> int | None:
        """Optimizer steps of a confirmation run; None before a conductor has begun."""
        conducted = newest(self.lines, Conducted)
        return None if conducted is None else conducted.confirmation_steps

    @property
    def answer(self) -> BatchAnswer | None:
        """The answer; None before the search has one."""
        return None if self.ended is None else self.ended.answer


class BatchFollower:
    """Reads new journal lines at each `poll`. Not safe to share between threads."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._journal: FollowedJournal[BatchLine] = FollowedJournal(directory, BatchLine)
        self._snapshot = BatchSnapshot(directory=directory, state="starting", lines=(), unreadable_lines=0)

    def poll(self) -> BatchSnapshot:
        """Read the new lines and return a snapshot: the last one if neither the lines nor the state changed."""
        has_conductor = self._journal.read()
        lines, unreadable_lines, snapshot = self._journal.lines, self._journal.unreadable_lines, self._snapshot
        if (len(lines), unreadable_lines) != (len(snapshot.lines), snapshot.unreadable_lines):
            snapshot = replace(snapshot, lines=lines, unreadable_lines=unreadable_lines)
        state = state_of_search(self.directory, snapshot, has_conductor=has_conductor)
        self._snapshot = snapshot if state == snapshot.state else replace(snapshot, state=state)
        return self._snapshot

"""Follow a best-fit search through its journal: a snapshot at each poll, for a screen."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trainfast_runner.search.best.best_so_far import BestSoFar
from trainfast_runner.search.best.person_instructions import read_instructions
from trainfast_runner.search.journal.best import BestLine, Instruction
from trainfast_runner.search.journal.followed_journal import FollowedJournal, SearchSnapshot, state_of_search


@dataclass(frozen=True)
class BestSnapshot(SearchSnapshot):
    """The state of a best-fit search at one moment."""

    so_far: BestSoFar
    untaken_instructions: tuple[Instruction, ...] = ()
    """The instructions that the conductor has not taken yet."""


class BestFollower:
    """Reads new journal lines at each `poll`. Not safe to share between threads."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._journal: FollowedJournal[BestLine] = FollowedJournal(directory, BestLine)
        self._so_far = BestSoFar(())

    def poll(self) -> BestSnapshot:
        """Read the new lines and return a snapshot."""
        has_conductor = self._journal.read()
        if len(self._journal.lines) > len(self._so_far.lines):
            self._so_far = BestSoFar(self._journal.lines)
        untaken_instructions: list[Instruction] = []
        with suppress(OSError):  # unreadable for the moment
            untaken_instructions = read_instructions(self.directory)[len(self._so_far.instructions) :]
        state = state_of_search(self.directory, self._so_far, has_conductor=has_conductor)
        return BestSnapshot(self.directory, state, self._so_far, tuple(untaken_instructions))

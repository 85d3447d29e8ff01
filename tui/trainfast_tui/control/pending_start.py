"""A start, from the key press until the reader shows the started run or search."""

from __future__ import annotations

from pathlib import Path


class PendingStart:
    """A start of a run or a search: begun, then started or refused, then seen."""

    def __init__(self) -> None:
        self._is_begun = False
        self._unseen_directory: Path | None = None
        """The run or search that was started and that the reader does not show yet."""

    @property
    def is_pending(self) -> bool:
        """True if a start was begun that has neither been refused nor seen."""
        return self._is_begun or self._unseen_directory is not None

    def begin(self) -> None:
        """Record that a thread is starting a run or a search."""
        self._is_begun = True

    def note_started(self, directory: Path) -> None:
        """Record that the run or search holds its lock; the reader may still show an earlier one."""
        self._is_begun, self._unseen_directory = False, directory

    def note_refused(self) -> None:
        """Record that nothing was started."""
        self._is_begun = False

    def note_seen(self, directory: Path | None) -> bool:
        """Record the shown run or search; return True if it was started here."""
        unseen = self._unseen_directory
        if unseen is not None and (directory == unseen or not unseen.exists()):
            self._unseen_directory = None
        return unseen is not None and directory == unseen

    def stop_waiting(self) -> None:
        """Stop waiting for the started run or search: a person chose to see another."""
        self._unseen_directory = None

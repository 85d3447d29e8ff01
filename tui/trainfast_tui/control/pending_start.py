"""A start from the key press until the reader shows what was started."""

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
        """Record that a thread is starting one."""
        self._is_begun = True

    def note_started(self, directory: Path) -> None:
        """Record that it holds its lock; the reader may still show the one before."""
        self._is_begun, self._unseen_directory = False, directory

    def note_refused(self) -> None:
        """Record that nothing was started."""
        self._is_begun = False

    def note_seen(self, directory: Path | None) -> bool:
        """Record the one that the reader shows; True if it is the one that was started here."""
        unseen = self._unseen_directory
        if unseen is not None and (directory == unseen or not unseen.exists()):
            self._unseen_directory = None
        return unseen is not None and directory == unseen

    def note_left(self) -> None:
        """Record that another one was chosen to be shown: do not wait for the started one."""
        self._unseen_directory = None

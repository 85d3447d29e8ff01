"""The searches of a home on disk: their directories, and the lock that a search's one conductor holds."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainfast_runner.records.file_locks import is_locked, try_exclusive_lock
from trainfast_runner.records.home import ID_PATTERN, Home, home_error
from trainfast_runner.records.run_file import RunFile
from trainfast_runner.worker.shared.lock_files import SEARCH_LOCK_FILE

JOURNAL_FILE = "journal.jsonl"
PAUSE_FILE = "paused"
"""File during whose existence the conductor takes no further step."""


def search_directories(home: Home) -> list[Path]:
    """Every search of a home, oldest first: the folders named by an id, with a journal; empty if another user's.

    Raises UserError when they cannot be listed for another reason. `new_search` refuses another user's folder.
    """
    try:
        with os.scandir(home.searches) as entries:
            ids = [entry.name for entry in entries if ID_PATTERN.fullmatch(entry.name)]
    except (FileNotFoundError, PermissionError):
        return []
    except OSError as error:
        raise home_error(home.path, error) from None
    return [directory for search_id in sorted(ids) if has_journal(directory := home.search_directory(search_id))]


def newest_search_directories(home: Home, count: int) -> list[Path]:
    """The newest searches of a home, the newest first. Raises UserError when they cannot be listed."""
    return search_directories(home)[::-1][:count]


@contextmanager
def conductor_lock(directory: Path) -> Iterator[bool]:
    """Hold the search's lock as its one conductor; False while another conductor holds it."""
    fd = os.open(directory / SEARCH_LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        yield try_exclusive_lock(fd)
    finally:
        os.close(fd)


def is_conducted(directory: Path) -> bool:
    """True if a conductor works on this search now."""
    try:
        return is_locked(directory / SEARCH_LOCK_FILE, fcntl.LOCK_SH)
    except OSError:
        return False


def conducted_search_of(home: Home, run: RunFile) -> Path | None:
    """The directory of the search that started the run, while a conductor works on it; None for any other run.

    `bench` holds such a lock too, in a directory without a journal (`has_journal`).
    """
    directory = None if run.search_id is None else home.search_directory(run.search_id)
    return directory if directory is not None and is_conducted(directory) else None


def has_journal(directory: Path) -> bool:
    """True for the directory of a search, False for that of a bench."""
    return os.path.exists(directory / JOURNAL_FILE)  # False for another user's folder, where `Path.exists` raises


def may_start_a_run(directory: Path) -> bool:
    """True if a conductor works on this search and is not paused: its next process may start at any time."""
    return is_conducted(directory) and not (directory / PAUSE_FILE).exists()

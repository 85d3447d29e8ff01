"""The searches of a home on disk: their directories, and the lock that a search's one conductor holds."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainfast_runner.records.file_locks import is_held, try_exclusive_lock
from trainfast_runner.records.home import Home, home_error

JOURNAL_FILE = "journal.jsonl"
LOCK_FILE = "search.lock"


def search_directories(home: Home) -> list[Path]:
    """Every search of a home, oldest first. Raises UserError when they cannot be listed."""
    try:
        with os.scandir(home.searches) as entries:
            names = sorted(entry.name for entry in entries if os.path.exists(os.path.join(entry.path, JOURNAL_FILE)))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise home_error(home.path, error) from None
    return [home.search_directory(name) for name in names]


def newest_search_directories(home: Home, count: int) -> list[Path]:
    """The newest searches of a home, the newest first. Raises UserError when they cannot be listed."""
    return search_directories(home)[::-1][:count]


@contextmanager
def conductor_lock(directory: Path) -> Iterator[bool]:
    """Hold the search's lock as its one conductor; False while another conductor holds it."""
    fd = os.open(directory / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        yield try_exclusive_lock(fd)
    finally:
        os.close(fd)


def is_conducted(directory: Path) -> bool:
    """True if a conductor works on this search now."""
    try:
        fd = os.open(directory / LOCK_FILE, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    return is_held(fd, fcntl.LOCK_SH)

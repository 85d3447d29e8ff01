"""Locks on files; a run is alive while any process holds the lock of its directory."""

from __future__ import annotations

import errno
import fcntl
import math
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from trainfast_runner.records.json_lines import UNREADABLE, open_regular
from trainfast_runner.worker.shared.host import ALIVE_LOCK_FILE, OnWait, print_holder, wait_for_lock

READERS_WITHIN_S = 0.1
"""Seconds of tries for a lock that a reader may hold for an instant."""


@contextmanager
def locked(
    path: Path, kind: int = fcntl.LOCK_EX, on_wait: OnWait = print_holder, within_s: float = math.inf
) -> Iterator[int]:
    """Hold the lock of this file, which is made if need be; waits for its holders, yields the descriptor.

    Raises TimeoutError, an OSError, if they keep it for `within_s` seconds.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if not wait_for_lock(fd, kind, on_wait, within_s):
            raise TimeoutError(errno.ETIMEDOUT, f"still locked after {within_s:g} s", str(path))
        yield fd
    finally:
        os.close(fd)


def is_locked(path: Path, against: int) -> bool:
    """True if another lock on the file forbids this kind (`LOCK_EX`, `LOCK_SH`).

    Raises OSError if the file cannot be opened.
    """
    fd = open_lock(path)
    try:
        fcntl.flock(fd, against | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def try_exclusive_lock(fd: int) -> bool:
    """Take the exclusive lock of an open file; waits for readers, which hold it for an instant."""
    return wait_for_lock(fd, fcntl.LOCK_EX, within_s=READERS_WITHIN_S)


def shared_lock(directory: Path) -> AbstractContextManager[int]:
    """Hold the run's lock as one of the processes that keep it alive; yields the descriptor."""
    return locked(directory / ALIVE_LOCK_FILE, fcntl.LOCK_SH)


def is_alive(directory: Path) -> bool:
    """True if any process of the run still holds its lock, or if this user cannot look at the lock."""
    try:
        return is_locked(directory / ALIVE_LOCK_FILE, fcntl.LOCK_EX)
    except FileNotFoundError:
        return False
    except OSError as error:
        if error.errno in UNREADABLE:
            return True
        raise


def open_lock(path: Path) -> int:
    """Return the descriptor of a lock's file, opened for an exclusive lock. Raises OSError."""
    try:
        # NFS gives an exclusive lock only on a writable descriptor.
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        return open_regular(path)

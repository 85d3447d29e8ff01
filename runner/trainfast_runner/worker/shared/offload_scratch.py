"""The directory of one run below `offload_path`, of gigabytes, which is removed when the run ends."""

from __future__ import annotations

import fcntl
import math
import os
import shutil
import tempfile
from pathlib import Path

from .lock_files import wait_for_lock

SCRATCH_PREFIX = "trainfast-offload-"
"""Beginning of the name of a directory for offloaded states."""
MARKER_FILE = "made-by-trainfast-tui"
"""The file that marks a directory as made here: only such directories are deleted."""
DISK_FULL_BELOW_BYTES = 1 << 24
"""A disk with less space than this counts as full: DeepSpeed writes blocks of 1 MiB from several threads."""
LOCK_WITHIN_S = 5.0
"""The supervisor tries to lock the user's directory for this long."""


class Scratch:
    """A new directory for this run, marked as ours and locked while this process lives.

    `path` is an empty directory for the states. Directories of runs that ended without removing them are removed first.
    """

    def __init__(self, parent: Path) -> None:
        with _Lock(parent, within_s=math.inf):
            _remove_unlocked(parent)
            self._folder = Path(tempfile.mkdtemp(prefix=SCRATCH_PREFIX, dir=parent))
            self._alive = _Lock(self._folder, within_s=0)
            (self._folder / MARKER_FILE).write_bytes(self._alive.mark())
        self.path = self._folder / "states"
        self.path.mkdir(mode=0o700)

    def remove(self) -> None:
        """Delete the directory with everything in it."""
        _delete(self._folder)
        self._alive.release()


def remove_leftovers(parent: Path) -> bool:
    """Delete the directories of runs that have ended; return False if another process keeps `parent` locked.

    Raises OSError if `parent` cannot be read.
    """
    with _Lock(parent.resolve(), within_s=LOCK_WITHIN_S) as lock:
        if lock.taken:
            _remove_unlocked(parent)
        return lock.taken


def free_bytes(parent: Path) -> int:
    """Bytes that this user may still write below `parent`. Raises OSError."""
    disk = os.statvfs(parent)
    return disk.f_bavail * disk.f_frsize


def _remove_unlocked(parent: Path) -> None:
    """Delete each directory that has our mark and that no live run has locked."""
    for folder in parent.glob(f"{SCRATCH_PREFIX}*"):
        try:
            lock = _Lock(folder, within_s=0)
        except OSError:
            continue  # a file, a link, or a directory of another user
        with lock:
            if lock.taken and _is_marked(folder, lock):
                _delete(folder)


def _is_marked(folder: Path, lock: _Lock) -> bool:
    try:
        return (folder / MARKER_FILE).read_bytes() == lock.mark()
    except OSError:
        return False


def _delete(folder: Path) -> None:
    """Delete the mark last, so that the rest of an interrupted deletion is still marked."""
    shutil.rmtree(folder / "states", ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)


class _Lock:
    """An exclusive flock on a directory, which ends with its process; `taken` is True if this process has it.

    Raises OSError for a link, for anything that is not a directory, and on a file system without locks.
    """

    def __init__(self, folder: Path, *, within_s: float) -> None:
        self._fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (0 if within_s else os.O_NOFOLLOW))
        try:
            self.taken = wait_for_lock(self._fd, fcntl.LOCK_EX, within_s=within_s)
        except OSError:
            os.close(self._fd)
            raise

    def mark(self) -> bytes:
        """Content of the marker: user and inode, so that a copy of the directory is not marked."""
        return f"user {os.geteuid()}, inode {os.fstat(self._fd).st_ino}\n".encode()

    def release(self) -> None:
        """Unlock the directory."""
        os.close(self._fd)

    def __enter__(self) -> _Lock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

"""Unneeded entries of the cache directory; each is made again when it is missing."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trainfast_runner.records.file_locks import is_locked

FOLDERS_OF_FILES = ("inspected", "traced")
"""Folders of small files, written and read by one command at a time."""
FOLDERS_OF_FOLDERS = ("tokens", "images", "extensions")
"""Folders of folders, which a training has open for as long as it runs."""
STAT_BLOCK_BYTES = 512
"""Unit of `st_blocks` (inode(7))."""
_HALF_MADE = re.compile(r"\.(\d+)\.tmp$|^\..+\.(\d+)(?:-\d+)?$")


@dataclass(frozen=True)
class UnneededEntry:
    """A file or folder that can be deleted, its size on the disk, and the reason as text."""

    path: Path
    size_bytes: int
    reason: str


def unneeded_entries(cache: Path, older_than_s: float, now_s: float, *, is_training: bool) -> list[UnneededEntry]:
    """Entries unused for longer than `older_than_s`, half-made files, and locks that no process holds.

    Entries that a training may have open are left out while one `is_training`.
    """
    return [
        UnneededEntry(path, disk_bytes(path), reason)
        for name in (*FOLDERS_OF_FILES, *(() if is_training else FOLDERS_OF_FOLDERS))
        for path in _entries(cache / name)
        if (reason := _unneeded_reason(path, older_than_s, now_s)) is not None
    ]


def _entries(folder: Path) -> list[Path]:
    """The entries of a folder of the cache; empty if it is missing, or another user's."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def remove(entry: UnneededEntry) -> bool:
    """Delete an entry; False if its lock was taken meanwhile, or it cannot be deleted."""
    path = entry.path
    try:
        if path.suffix != ".lock":
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
            return True
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
        finally:
            os.close(fd)
    except OSError:
        return False
    return True


def disk_bytes(path: Path) -> int:
    """Bytes on the disk of a file, or of a folder with its contents; links are not followed."""
    if path.is_symlink() or not path.is_dir():
        with suppress(OSError):
            return os.lstat(path).st_blocks * STAT_BLOCK_BYTES
        return 0
    total = 0
    for folder, _, files in os.walk(path):
        for name in (".", *files):
            with suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_blocks * STAT_BLOCK_BYTES
    return total


def _unneeded_reason(path: Path, older_than_s: float, now_s: float) -> str | None:
    try:
        status = path.lstat()
        if path.suffix == ".lock":
            return None if is_locked(path, fcntl.LOCK_EX) else "an unused lock"
    except OSError:
        return None
    if (writer := _HALF_MADE.search(path.name)) is not None:
        return None if os.path.exists(f"/proc/{writer[1] or writer[2]}") else "left half-made"
    unused_s = now_s - _last_use_s(path, status)
    return f"not read or changed for {unused_s / 86400:.0f} days by its file times" if unused_s > older_than_s else None


def _last_use_s(path: Path, status: os.stat_result) -> float:
    """The newest time of an entry's files: reading sets it at most a day late (relatime), or never (noatime).

    A folder counts by its change alone, because listing it here reads it.
    """
    if not stat.S_ISDIR(status.st_mode):
        return max(status.st_mtime, status.st_atime)
    times_s = [status.st_mtime]
    for folder, folders, files in os.walk(path):
        for name in (*folders, *files):
            with suppress(OSError):
                inner_status = os.lstat(os.path.join(folder, name))
                times_s.append(
                    inner_status.st_mtime
                    if stat.S_ISDIR(inner_status.st_mode)
                    else max(inner_status.st_mtime, inner_status.st_atime)
                )
    return max(times_s)

"""Reading of files that anyone may have put there: regular ones alone, without waiting, up to a bound."""

from __future__ import annotations

import errno
import os
import pwd
import stat
from pathlib import Path

MAX_BYTES = 256 << 20
"""Chosen, not measured: more than any file that is read as a whole."""
UNREADABLE = frozenset((errno.EACCES, errno.EPERM, errno.EISDIR, errno.ELOOP, errno.EINVAL, errno.EFBIG, errno.ENXIO))
"""Errors that stay: of another user's file, of one that is not regular, and of one that is too large."""


def open_regular(path: Path | str) -> int:
    """Return the descriptor of a file opened for reading. Raises OSError for all but a regular file."""
    # A pipe without a writer, or a terminal, would wait.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode):
        return fd
    os.close(fd)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "not a regular file", str(path))


def read_regular(path: Path | str) -> bytes:
    """Return the content of a regular file. Raises OSError for any other, and for one of more than MAX_BYTES."""
    fd = open_regular(path)
    try:
        size = os.fstat(fd).st_size
        if size > MAX_BYTES:
            raise OSError(errno.EFBIG, f"larger than {MAX_BYTES >> 20} MiB", str(path))
        return os.read(fd, size + 1)
    finally:
        os.close(fd)


def owner_of(path: Path) -> str:
    """Return the name of the user who owns the file, or the first folder above it that can be looked at."""
    try:
        uid = path.lstat().st_uid
    except OSError:
        return owner_of(path.parent)
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"

"""Build DeepSpeed's extensions in one process at a time, also after a killed build that left its lock."""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..invalid import InvalidInput

LOOK_EVERY_S = 0.2
UNKNOWN_WITHIN_S = 300.0
"""Longest wait if the kernel cannot tell whether a build runs: several times the length of a build."""


@contextmanager
def only_builder(extension: str) -> Iterator[None]:
    """Hold TORCH_EXTENSIONS_DIR for the build of `extension`, after any running build of it has ended.

    Our ranks wait for each other by a flock; a user's own script has only torch's lock file. Raises InvalidInput if
    that file stays and the kernel cannot tell whether a build holds it.
    """
    given = os.environ.get("TORCH_EXTENSIONS_DIR")
    if not given:
        yield
        return
    folder = Path(given)
    folder.mkdir(parents=True, exist_ok=True)
    fd = os.open(folder / "builder.flock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        _wait_for_build(folder / extension / "lock")
        yield
    finally:
        os.close(fd)


def _wait_for_build(lock: Path) -> None:
    """Return when `lock` is gone; delete it if its build was killed, because torch would wait for ever."""
    has_printed, deadline = False, time.monotonic() + UNKNOWN_WITHIN_S
    while (held := _is_held(lock)) is not False:
        if held is None and time.monotonic() > deadline:
            raise InvalidInput(f"cannot tell whether a build still holds {lock}: delete it if none runs", "strategy")
        if not has_printed:
            print(f"deepspeed: waiting for the build that holds {lock}; delete it if no build is running", flush=True)
            has_printed = True
        time.sleep(LOOK_EVERY_S)
    lock.unlink(missing_ok=True)


def _is_held(lock: Path) -> bool | None:
    """False if no live build holds torch's lock file; None if the kernel cannot tell.

    torch.utils.file_baton keeps the file open from its creation to its deletion. A write lease is granted only if no
    other process, also in another container, has the file open (fcntl(2), F_SETLEASE).
    """
    try:
        _lease(lock)
    except FileNotFoundError:
        return False
    except OSError as error:
        return True if error.errno == errno.EAGAIN and _gives_leases(lock.parent) else None
    return False


def _gives_leases(folder: Path) -> bool:
    """False if the file system, such as NFS, refuses a lease on a file that nobody else has open."""
    try:
        fd, name = tempfile.mkstemp(dir=folder, prefix=".lease-")
        os.close(fd)
        try:
            _lease(Path(name))
        finally:
            os.unlink(name)
    except OSError:
        return False
    return True


def _lease(path: Path) -> None:
    """Take a write lease on a file and give it back. Raises OSError if it is refused."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    finally:
        os.close(fd)

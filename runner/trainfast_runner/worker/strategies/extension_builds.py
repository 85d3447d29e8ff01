"""DeepSpeed's extensions are built by one process at a time, and a lock that a killed build left does not stop it."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOOK_EVERY_S = 0.2


@contextmanager
def only_builder() -> Iterator[None]:
    """Hold TORCH_EXTENSIONS_DIR for one build, after the builds that go on there have ended.

    Our ranks wait for each other by a flock. A user's own script knows only torch's lock file.
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
        for lock in folder.glob("*/lock"):
            _wait_for_build(lock)
        yield
    finally:
        os.close(fd)


def _wait_for_build(lock: Path) -> None:
    """Return when `lock` is gone; delete it if its build was killed, for which torch would wait for ever."""
    told = False
    while _may_be_held(lock):
        if not told:
            print(f"deepspeed: waiting for the build that holds {lock}; delete it if no build is running", flush=True)
            told = True
        time.sleep(LOOK_EVERY_S)
    lock.unlink(missing_ok=True)


def _may_be_held(lock: Path) -> bool:
    """False if no live build holds torch's lock file; True as well where the kernel cannot tell, as on NFS.

    torch.utils.file_baton keeps the file open from its creation to its deletion, and a write lease is given only on a
    file that nobody else has open, in this container or in another (fcntl(2), F_SETLEASE).
    """
    try:
        fd = os.open(lock, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False

"""A directory of one run's own below `offload_path`, which takes gigabytes and must not stay behind."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "trainfast-"


class Scratch:
    """An empty directory for this run; those of runs that ended without removing theirs are removed first.

    A flock on the directory itself says that its run is alive, and goes with the process, however that ends.
    """

    def __init__(self, parent: Path) -> None:
        with _Held(parent, wait=True):
            for left in parent.glob(f"{PREFIX}*"):
                held = _Held(left, wait=False)
                if held.taken:
                    shutil.rmtree(left, ignore_errors=True)
                held.release()
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
            self._alive = _Held(self.path, wait=False)

    def remove(self) -> None:
        """Delete it with everything in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._alive.release()


class _Held:
    """An exclusive flock on a directory; `taken` says whether it is ours."""

    def __init__(self, folder: Path, wait: bool) -> None:
        self._fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            self.taken = True
        except BlockingIOError:
            self.taken = False

    def release(self) -> None:
        """Let go of it."""
        os.close(self._fd)

    def __enter__(self) -> _Held:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

"""Build DeepSpeed's extensions in one process at a time, also after a killed build that left its lock."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def only_builder(extension: str) -> Iterator[None]:
    """Hold TORCH_EXTENSIONS_DIR, a folder of ours alone, for the build of `extension`, after any running one.

    A lock file of torch's that is there then was left by a killed build; torch would wait for it for ever.
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
        (folder / extension / "lock").unlink(missing_ok=True)
        yield
    finally:
        os.close(fd)

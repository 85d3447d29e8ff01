"""A run's `offload_path`: its free space, and the removal of files that a dead training left there."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path

from trainfast_runner.units import mebibytes
from trainfast_runner.worker.shared.offload_scratch import DISK_FULL_BELOW_BYTES, free_bytes, remove_leftovers

DISK_ANSWERS_S = 5.0
"""Time for `offload_path` to answer with its free space."""


def full_disk_text(path: Path | None) -> str | None:
    """The path with its free space if its disk is full; None otherwise."""
    if path is None:
        return None
    free_readings: list[int] = []

    def read_free() -> None:
        with suppress(OSError):
            free_readings.append(free_bytes(path))

    # A dead NFS server never answers, and the verdict does not wait for it.
    reading = threading.Thread(target=read_free, daemon=True)
    reading.start()
    reading.join(DISK_ANSWERS_S)
    return (
        f"offload_path={path} is full ({mebibytes(free_readings[0])} free)"
        if free_readings and free_readings[0] < DISK_FULL_BELOW_BYTES
        else None
    )


def remove_offloaded(path: Path | None) -> str | None:
    """Delete files that the run offloaded and could not delete itself; the trouble in words if they are locked."""
    if path is not None:
        with suppress(OSError):
            if not remove_leftovers(path):
                return f"offload_path={path} is locked: the next run frees its disk"
    return None

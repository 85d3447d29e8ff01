"""The parent's orders to a warm process: lines of `control.jsonl`, which every rank reads for itself."""

from __future__ import annotations

import fcntl
import json
import os
import time
from pathlib import Path
from typing import Any

from .shared_tables import CONTROL_FILE

LOOK_EVERY_S = 0.02
PARENT_EVERY_S = 1.0


class Orders:
    """The parent's orders, one line of `control.jsonl` for each.

    The parent holds `search_lock` for as long as it lives, and nobody else writes here: once the lock is free no
    further line comes, so all ranks read the same orders.
    """

    def __init__(self, control: Path, search_lock: Path) -> None:
        self._control = control
        self._search_lock = search_lock
        self._taken = 0

    def next(self) -> dict[str, Any] | None:
        """Wait for the next order and return its fields; None when the parent ends the process or is gone."""
        looked = time.monotonic()
        while True:
            line = self._line()
            if line is None and time.monotonic() - looked > PARENT_EVERY_S:
                looked = time.monotonic()
                if self._parent_is_gone():
                    # It may have written its last line just before it died.
                    line = self._line()
                    if line is None:
                        return None
            if line is not None:
                self._taken += 1
                return None if line["do"] == "end" else line
            time.sleep(LOOK_EVERY_S)

    def _line(self) -> dict[str, Any] | None:
        try:
            lines = self._control.read_bytes().split(b"\n")[:-1]
        except FileNotFoundError:
            return None
        order: dict[str, Any] | None = json.loads(lines[self._taken]) if len(lines) > self._taken else None
        return order

    def _parent_is_gone(self) -> bool:
        try:
            fd = os.open(self._search_lock, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return True
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        finally:
            os.close(fd)
        return True


def orders_of(run_dir: Path, search_id: str) -> Orders:
    """The orders of the search that this run belongs to: searches stand beside runs."""
    return Orders(run_dir / CONTROL_FILE, run_dir.parent.parent / "searches" / search_id / "search.lock")

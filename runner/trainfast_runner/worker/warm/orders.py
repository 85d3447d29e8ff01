"""The parent's orders to a warm process: lines of `control.jsonl`, which every rank reads for itself."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

POLL_S = 0.02
"""Seconds between looks for the next order."""
PARENT_CHECK_S = 1.0
"""Seconds between checks that the parent lives."""


@dataclass(frozen=True)
class ProbeOrder:
    """An order to take `steps` optimizer steps at this batch size."""

    batch_size: int
    steps: int


@dataclass(frozen=True)
class TrialOrder:
    """An order to try settings, or to take more steps of the last ones."""

    knobs: dict[str, Any]
    """Values of the knobs that are tried."""
    untimed: int
    """Steps before the timed ones, in which the memory is measured."""
    steps: int
    """Timed steps."""
    more: bool
    """True to continue the last trial with `steps` more timed steps; `untimed` and `knobs` are ignored."""


Order = TypeVar("Order", bound=ProbeOrder | TrialOrder)


class Orders(Generic[Order]):
    """The parent's orders of one kind, one line of `control.jsonl` for each.

    The parent holds `search_lock` for as long as it lives, and nobody else writes here: once the lock is free no
    further line comes, so all ranks read the same orders.
    """

    def __init__(self, control: Path, search_lock: Path, kind: type[Order]) -> None:
        self._kind = kind
        self._control = control
        self._search_lock = search_lock
        self._taken = 0

    def next(self) -> Order | None:
        """Wait for the next order and return it; None when the parent ends the process or is gone."""
        last_check = time.monotonic()
        while True:
            parent_is_gone = False
            if time.monotonic() - last_check > PARENT_CHECK_S:
                last_check = time.monotonic()
                parent_is_gone = self._parent_is_gone()
            # Read after that check, because the parent may have written its last line just before it ended.
            line = self._next_line()
            if line is not None:
                self._taken += 1
                if line["do"] == "end":
                    return None
                return self._kind(**{field.name: line[field.name] for field in dataclasses.fields(self._kind)})
            if parent_is_gone:
                return None
            time.sleep(POLL_S)

    def _next_line(self) -> dict[str, Any] | None:
        try:
            lines = self._control.read_bytes().split(b"\n")[:-1]
        except FileNotFoundError:
            return None
        line: dict[str, Any] | None = json.loads(lines[self._taken]) if len(lines) > self._taken else None
        return line

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

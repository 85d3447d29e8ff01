"""An append-only file of JSON lines: one `write()` a line, never waiting for a reader."""

from __future__ import annotations

import json
import os
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

MAX_KEPT_LINES = 64
"""Chosen, not measured: the most lines that wait for a full disk; a run has few lines that are kept."""


def rank_suffix(rank: int) -> str:
    """Part of a file's name: empty for rank 0, else `.rank1` and so on."""
    return "" if rank == 0 else f".rank{rank}"


class RecordFile:
    """An append-only JSON-lines file. Every line is one `os.write` to an O_APPEND descriptor, so lines never mix.

    A full disk does not end a training: the line is dropped, or with `keep` kept for later, among the newest
    `MAX_KEPT_LINES`.
    `complain` is called with the first failure, and when the file can be written again.
    """

    def __init__(self, path: Path, *, keep: bool = False, complain: Callable[[str], None] | None = None) -> None:
        self._name = path.name
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._waiting: deque[bytes] | None = deque(maxlen=MAX_KEPT_LINES) if keep else None
        self._complain = complain
        self._lost = 0
        self._torn = False
        """True if the last line was cut short: the next one begins on a new line."""

    @property
    def is_behind(self) -> bool:
        """True if lines wait to be written."""
        return bool(self._waiting)

    def write(self, record: dict[str, Any]) -> None:
        """Append `record`; a value JSON cannot hold (NaN, infinity) becomes null."""
        try:
            text = json.dumps(record, separators=(",", ":"), allow_nan=False, default=str)
        except ValueError:
            text = json.dumps(_finite(record), separators=(",", ":"), default=str)
        line = text.encode() + b"\n"
        if self._waiting:
            self._waiting.append(line)
            self.catch_up()
        elif not self._put(line) and self._waiting is not None:
            self._waiting.append(line)

    def catch_up(self) -> None:
        """Write the waiting lines until one cannot be written."""
        while self._waiting and self._put(self._waiting[0]):
            self._waiting.popleft()

    def _put(self, line: bytes) -> bool:
        """Append the line; return True if all of it is in the file."""
        line = b"\n" + line if self._torn else line
        try:
            written_bytes = os.write(self._fd, line)
        except OSError as error:
            self._lose(error.strerror)
            return False
        self._torn = written_bytes < len(line)
        if self._torn:
            self._lose("only part of a line was written")
            return False
        if self._lost and self._complain is not None:
            lost_count, self._lost = self._lost, 0
            self._complain(f"{self._name} can be written again: {lost_count} lines are missing")
        return True

    def _lose(self, reason: str | None) -> None:
        self._lost += 1
        if self._lost == 1:
            sentence = f"{self._name} cannot be written: {reason}; the training goes on"
            # The output is on the same disk, and may take nothing either.
            with suppress(OSError):
                print(sentence, file=sys.stderr)
            if self._complain is not None:
                self._complain(sentence)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value

"""Lines in the run directory, and the notes of errors of the door itself."""

from __future__ import annotations

import errno
import functools
import json
import math
import os
import time
from collections.abc import Callable
from typing import Any, TypeVar

RUN_VARIABLE = "TRAINFAST_RUN"
"""Names the run directory, in the environment of the command and all it starts."""
MAX_NOTES = 20
"""Chosen, not measured: the most problems that one process notes."""
NOTE_CHARACTERS = 500
"""Chosen, not measured: the most of a problem's text, as of an error that prints a tensor."""

Function = TypeVar("Function", bound="Callable[..., Any]")
_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False, default=str).encode
"""Returns the JSON of a value; raises ValueError for a number that is not finite."""
_noted: set[str] = set()
"""The problems that this process has noted."""


class LineFile:
    """An append-only file of JSON lines, of `directory` and `name`. Raises OSError."""

    def __init__(self, directory: str, name: str, flags: int = 0) -> None:
        path = os.path.join(directory, name)
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | flags, 0o600)
        self._torn = False
        """True if the last write was cut short: the next one begins on a line of its own."""

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def write(self, line: dict[str, Any]) -> None:
        """Append one line; a number that JSON cannot hold (NaN, infinity) becomes null."""
        try:
            text = _encode(line)
        except ValueError:
            text = _encode(_finite(line))
        self.write_text(text + "\n")

    def write_text(self, lines: str) -> None:
        """Append whole lines of JSON."""
        text = (("\n" if self._torn else "") + lines).encode()
        self._torn = os.write(self._fd, text) < len(text)
        if self._torn:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def append_line(directory: str, name: str, line: dict[str, Any]) -> None:
    """Append one line to a file that is not kept open. Raises OSError."""
    file = LineFile(directory, name)
    try:
        file.write(line)
    finally:
        file.close()


def never_raises(function: Function) -> Function:
    """Wrap `function` so that each Exception is noted instead of raised; SystemExit, a clean stop, passes."""

    @functools.wraps(function)
    def quiet(*arguments: Any, **keywords: Any) -> Any:
        try:
            return function(*arguments, **keywords)
        except Exception as error:
            # Many hooks have the same name: their module tells them apart. A partial has no name.
            named = getattr(function, "func", function)
            note_error(f"{named.__module__.rpartition('.')[2]}.{named.__name__}", error)
            return None

    return quiet  # type: ignore[return-value]


def note_error(hook: str, error: Exception) -> None:
    """Append an error of a hook to `door.jsonl`."""
    note(f"{hook}: {type(error).__name__}: {error}")


def note(detail: str) -> None:
    """Append a problem of the hooks to `door.jsonl`; a repeated text, or one after `MAX_NOTES`, is dropped."""
    directory = os.environ.get(RUN_VARIABLE)
    if not directory or detail in _noted or len(_noted) >= MAX_NOTES:
        return
    _noted.add(detail)
    line = {"t_ns": time.monotonic_ns(), "pid": os.getpid(), "kind": "trouble", "detail": detail[:NOTE_CHARACTERS]}
    try:
        append_line(directory, "door.jsonl", line)
    except (OSError, ValueError):
        return  # the run directory is gone, or the disk is full: the script goes on

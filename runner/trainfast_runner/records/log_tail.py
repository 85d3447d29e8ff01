"""The end of `output.log` as it grows: untrusted text, as long as a screen keeps it."""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path

LOG_LINES_KEPT = 400
LOG_LINE_CHARACTERS = 2000
LOG_WINDOW_BYTES = 256 << 10


class LogTail:
    """The last lines of `output.log`, with carriage returns applied as by a terminal."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset: int | None = None
        self._lines: deque[str] = deque(maxlen=LOG_LINES_KEPT)
        self._rest = b""

    def read(self) -> bool:
        """Read new text; True if there was any."""
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            size = os.fstat(fd).st_size
            if self._offset is None or size < self._offset or size - self._offset > LOG_WINDOW_BYTES:
                # The first read, a log cut meanwhile, or more than is kept: continue near the end.
                self._offset, self._rest = max(0, size - LOG_WINDOW_BYTES), b""
                self._lines.clear()
            chunk = os.pread(fd, LOG_WINDOW_BYTES, self._offset)
        except OSError:
            return False
        finally:
            os.close(fd)
        self._offset += len(chunk)
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        self._rest = self._rest[-4 * LOG_LINE_CHARACTERS :]
        self._lines.extend(_shown(line) for line in lines)
        return bool(chunk)

    def lines(self) -> tuple[str, ...]:
        """The last lines, the unfinished one too."""
        rest = _shown(self._rest)
        return (*self._lines, rest) if rest else tuple(self._lines)


def _shown(line: bytes) -> str:
    """One line after its carriage returns; the zero bytes of a hole are gone."""
    last = line.replace(b"\0", b"").rstrip(b"\r").rpartition(b"\r")[2]
    return last.decode(errors="replace")[:LOG_LINE_CHARACTERS]

"""The end of `output.log` as it grows: untrusted text, as long as a screen keeps it."""

from __future__ import annotations

from pathlib import Path

from trainfast_runner.records.output_log import read_log

LOG_LINES_KEPT = 400
LOG_LINE_CHARACTERS = 2000
LOG_WINDOW_BYTES = 256 << 10


class LogTail:
    """The last lines of `output.log`, with carriage returns applied as by a terminal."""

    def __init__(self, path: Path) -> None:
        self.lines: tuple[str, ...] = ()
        """The last lines, the unfinished one too."""
        self._path = path
        self._size = 0

    def read(self) -> bool:
        """Read the end again if the file has changed; True if it has."""
        try:
            size = self._path.stat().st_size
            if size == self._size:
                return False
            lines = read_log(self._path, LOG_LINES_KEPT, LOG_WINDOW_BYTES)
        except OSError:
            return False
        self._size = size
        self.lines = tuple(line.rstrip("\r").rpartition("\r")[2][:LOG_LINE_CHARACTERS] for line in lines)
        return True

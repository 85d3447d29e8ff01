"""`output.log`: the training's output, written by the training itself; read by lines, and followed as it grows."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

OUTPUT_FILE = "output.log"
LOG_LINES_KEPT, LOG_LINE_CHARACTERS, LOG_WINDOW_BYTES = 400, 2000, 256 << 10
"""Bounds of the end that a screen keeps."""
_BLOCK = 1 << 16


def read_log(path: Path, last_lines: int | None = None, most_bytes: float = math.inf) -> list[str]:
    """The last lines of the output, or all of it, without line ends; a hole reads as one line with its size.

    About `most_bytes` from the end are read, however few lines that are. Control sequences are left in, to be removed
    before the text is shown. Empty without a file.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return []
    try:
        parts: list[bytes] = []
        lines = length = 0
        for part in _backwards(fd):
            parts.append(part)
            lines, length = lines + part.count(b"\n"), length + len(part)
            if (last_lines is not None and lines > last_lines) or length >= most_bytes:
                break
    finally:
        os.close(fd)
    text = b"".join(reversed(parts)).decode(errors="replace").replace("\0", "")
    whole_lines = text.removesuffix("\n").split("\n") if text else []
    return whole_lines if last_lines is None else whole_lines[len(whole_lines) - min(last_lines, len(whole_lines)) :]


class LogTail:
    """The last lines of `output.log`: untrusted text, with carriage returns applied as by a terminal."""

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


def _backwards(fd: int) -> Iterator[bytes]:
    """The file's data in blocks, the last first; each hole as a line of its own."""
    segments = list(_segments(fd))
    for number, (start, end) in reversed(list(enumerate(segments))):
        while end > start:
            begin = max(start, end - _BLOCK)
            yield os.pread(fd, end - begin, begin)
            end = begin
        if number > 0 and (hole := start - segments[number - 1][1]) > 0:
            yield f"\n[trainfast-tui: about {hole} bytes of output were dropped here]\n".encode()


def _segments(fd: int) -> Iterator[tuple[int, int]]:
    """Ranges that hold data; the whole file if the file system lists no holes."""
    size, offset = os.fstat(fd).st_size, 0
    while offset < size:
        try:
            start = os.lseek(fd, offset, os.SEEK_DATA)
            offset = os.lseek(fd, start, os.SEEK_HOLE)
        except OSError:
            # ENXIO: only a hole is left. Other errors: not supported here, so all is data.
            if offset == 0:
                yield 0, size
            return
        yield start, min(offset, size)

"""`output.log`: the training's output, written by the training itself; read by lines, and followed as it grows."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from trainfast_runner.records.capped_file import HEAD_BYTES, dropped_text
from trainfast_runner.records.regular_files import open_regular

OUTPUT_FILE = "output.log"
LOG_LINES_KEPT, LOG_LINE_CHARACTERS, LOG_WINDOW_BYTES = 400, 2000, 256 << 10
"""Bounds of the end that a screen keeps."""
_BLOCK_BYTES = 1 << 16
_READ_BYTES = 1 << 20
"""The most that one look at a growing log reads."""
_LONGEST_LINE_BYTES = 1 << 16
"""The most that is kept of a line without an end: its newest part."""


def read_log(
    path: Path, last_lines: int | None = None, most_bytes: float = math.inf, *, end: int | None = None
) -> list[str]:
    """The last lines of the output, or all of it, without line ends; a hole reads as one line with its size.

    Reads about `most_bytes` before `end` (default: the end of the file), even if that is fewer lines. Control sequences
    are left in, to be removed before the text is shown. Empty without a file.
    """
    try:
        fd = open_regular(path)
    except FileNotFoundError:
        return []
    try:
        parts: list[bytes] = []
        lines = length = 0
        for part in _backwards(fd, end):
            parts.append(part)
            lines, length = lines + part.count(b"\n"), length + len(part)
            if (last_lines is not None and lines > last_lines) or length >= most_bytes:
                break
    finally:
        os.close(fd)
    text = b"".join(reversed(parts)).decode(errors="replace").replace("\0", "")
    whole_lines = text.removesuffix("\n").split("\n") if text else []
    return whole_lines if last_lines is None else whole_lines[len(whole_lines) - min(last_lines, len(whole_lines)) :]


def last_line(lines: Sequence[str]) -> str:
    """The last of these lines that is not blank; empty without one."""
    return next((line for line in reversed(lines) if line.strip()), "")


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


class GrowingLog:
    """The lines of `output.log` as they are completed, each once; owns the offset up to which they were returned.

    The file stays open: after the last writer a compacted file takes its path, and only the open one has every line.
    """

    def __init__(
        self,
        path: Path,
        last_lines: int | None = None,
        *,
        from_begin: bool = False,
        separators: bytes = rb"\n",
        head_bytes: int = HEAD_BYTES,
    ) -> None:
        """Begin with the `last_lines` complete lines that are there now, or with all of them.

        With `from_begin` each call reads the next part. `separators` is the regular expression of a line's end,
        `head_bytes` the part of the file that is never cut.
        """
        self._path = path
        self._last_lines = last_lines
        self._separators = re.compile(separators)
        self._head_bytes = head_bytes
        self._fd: int | None = None
        """None before the file was there."""
        self._offset: int | None = 0 if from_begin else None
        """None before the first look at the file."""
        self._unfinished = b""

    def read(self) -> list[str] | None:
        """Return the lines completed since the last call; None if nothing was appended, or without a file."""
        if self._fd is None:
            try:
                self._fd = open_regular(self._path)
            except FileNotFoundError:
                return None
        size = os.fstat(self._fd).st_size
        if self._offset is None:
            self._offset = _end_of_lines(self._fd, size)
            return read_log(self._path, self._last_lines, end=self._offset)
        if size < self._offset:
            # Cut after its head; the lines there were returned before.
            self._offset, self._unfinished = min(size, self._head_bytes), b""
        chunk = os.pread(self._fd, _READ_BYTES, self._offset)
        if not chunk:
            return None
        self._offset += len(chunk)
        first, *further_lines = self._separators.split(chunk)
        *complete, unfinished = [self._unfinished + first, *further_lines]
        # A progress bar may never end a line.
        self._unfinished = unfinished[-_LONGEST_LINE_BYTES:]
        return [_text(line) for line in complete]

    def close(self) -> None:
        """Close the file; nothing can be read after."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def unfinished(self) -> str:
        """Return the unfinished last line, of a long one the newest part; empty if the last line was complete."""
        return _text(self._unfinished)


def _text(line: bytes) -> str:
    return line.replace(b"\0", b"").decode(errors="replace")


def _end_of_lines(fd: int, size: int) -> int:
    """Return the offset after the last line end before `size`; 0 without one."""
    end = size
    while end > 0:
        begin = max(0, end - _BLOCK_BYTES)
        line_end = os.pread(fd, end - begin, begin).rfind(b"\n")
        if line_end >= 0:
            return begin + line_end + 1
        end = begin
    return 0


def _backwards(fd: int, end: int | None) -> Iterator[bytes]:
    """The file's data in blocks, the last first; each hole as a line of its own."""
    segments = list(_segments(fd, end))
    for number, (start, stop) in reversed(list(enumerate(segments))):
        while stop > start:
            begin = max(start, stop - _BLOCK_BYTES)
            yield os.pread(fd, stop - begin, begin)
            stop = begin
        if number > 0 and (hole := start - segments[number - 1][1]) > 0:
            yield f"\n{dropped_text(f'about {hole}')}\n".encode()


def _segments(fd: int, end: int | None) -> Iterator[tuple[int, int]]:
    """Ranges that hold data; all bytes before `end` if the file system lists no holes."""
    size, offset = os.fstat(fd).st_size if end is None else end, 0
    while offset < size:
        try:
            start = os.lseek(fd, offset, os.SEEK_DATA)
            offset = os.lseek(fd, start, os.SEEK_HOLE)
        except OSError:
            # ENXIO: only a hole is left. Other errors: not supported here, so all is data.
            if offset == 0:
                yield 0, size
            return
        if start >= size:
            return  # written since `end` was taken
        yield start, min(offset, size)

"""A file that grows while its writer lives, held under a size by another process: output, steps, telemetry.

Head and tail are kept, the middle goes: first as a hole in the file, at the end as one line with its size.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from trainfast_runner.records.json_lines import WINDOW_BYTES, Tail, open_regular, open_to_append, write_atomically
from trainfast_runner.records.run_lines import Count, Step
from trainfast_runner.records.tick import Tick

CAP_BYTES = 64 << 20
"""The cap of `output.log`, of each `steps*.jsonl` and of `telemetry.jsonl`."""
_FALLOC_KEEP_SIZE, _FALLOC_PUNCH_HOLE = 0x01, 0x02
"""Flags of fallocate(2), from the kernel's falloc.h."""
_PAGE_BYTES = 1 << 12


def head_of(cap_bytes: int) -> int:
    """Bytes kept from the start of a file under `cap_bytes`; the newest bytes are kept up to the same size."""
    # Whole pages: a part of a page at the edge of a hole would stay on disk.
    return max(_PAGE_BYTES, cap_bytes // 4 // _PAGE_BYTES * _PAGE_BYTES)


HEAD_BYTES = head_of(CAP_BYTES)


OUTPUT_MARK = b"[trainfast-tui: %b bytes of output were dropped here]\n"
RECORDS_MARK = b'{"dropped_bytes":%b}\n'
"""The line that replaces so many dropped bytes of output, and of records."""


class CappedFile:
    """Holds the file under `cap_bytes` of kept text: a quarter from the start, the newest quarter from the end.

    `dropped_bytes` counts the bytes dropped; `truncated` is True once the file system could not punch holes, and
    everything after the head was cut instead. `mark` stands for dropped bytes in the compacted file.
    """

    def __init__(self, path: Path, cap_bytes: int = CAP_BYTES, mark: bytes = OUTPUT_MARK) -> None:
        self.path = path
        self._mark = mark
        self.dropped_bytes = 0
        self.truncated = False
        self.cap_bytes = cap_bytes
        self.head_bytes = head_of(cap_bytes)
        self._hole_end = self.head_bytes

    def open(self) -> int:
        """A descriptor to append to the file; only its owner can read the file."""
        return open_to_append(self.path)

    def trim(self) -> int:
        """Drop the middle of a file over its cap; return the bytes dropped. Raises OSError."""
        with self.path.open("rb+", buffering=0) as file:
            fd = file.fileno()
            size = os.fstat(fd).st_size
            if size - self._hole_end + self.head_bytes <= self.cap_bytes:
                return 0
            hole_end = (size - self.head_bytes) // _PAGE_BYTES * _PAGE_BYTES
            if _punch(fd, self._hole_end, hole_end - self._hole_end):
                dropped, self._hole_end = hole_end - self._hole_end, hole_end
            else:
                # Writers append, so they continue at the new end.
                os.ftruncate(fd, self.head_bytes)
                dropped, self._hole_end, self.truncated = size - self.head_bytes, self.head_bytes, True
        self.dropped_bytes += dropped
        return dropped

    def compact(self) -> None:
        """Rewrite the ended file as head, a line with the count of dropped bytes, and tail. Raises OSError."""
        if not self.dropped_bytes:
            return
        with self.path.open("rb") as file:
            head = file.read(self.head_bytes)
            file.seek(self._hole_end)
            tail = file.read()
        head = head[: head.rfind(b"\n") + 1] or head + b"\n"
        # A hole ends within a line; after a truncation the next write begins one.
        whole_lines = 0 if self.truncated else tail.find(b"\n") + 1
        write_atomically(self.path, head + self._mark % str(self.dropped_bytes).encode() + tail[whole_lines:])


def _punch(fd: int, start: int, length: int) -> bool:
    """Free the blocks of a range, the size unchanged; False when the file system cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    return int(libc.fallocate(fd, _FALLOC_PUNCH_HOLE | _FALLOC_KEEP_SIZE, start, length)) == 0


T = TypeVar("T", bound=Step | Tick)


class Dropped(msgspec.Struct, frozen=True, kw_only=True):
    """A line of compacted records: those that stood here, in bytes."""

    dropped_bytes: Count


class RecordTail(Tail[T]):
    """Follows records in the order of their time, dropped ones left out; none comes twice when the file is cut."""

    def __init__(self, path: Path, type: type[T], window_bytes: int = WINDOW_BYTES) -> None:
        super().__init__(path, type, window_bytes)
        self._marked_bytes = 0
        self._newest_ns = self._given_ns = -1

    @property
    def dropped_bytes(self) -> int:
        """Bytes of dropped records: the hole in the file, and its marks."""
        return self.hole_bytes + self._marked_bytes

    def decode(self, line: bytes) -> T | None:
        """The record of this line; None for a mark, and for one seen before. Raises msgspec.DecodeError for damage."""
        if line.startswith(RECORDS_MARK.partition(b"%")[0]):
            self._marked_bytes += msgspec.json.decode(line, type=Dropped).dropped_bytes
            return None
        record = super().decode(line)
        if record is None or record.t_ns <= self._given_ns:
            return None
        self._newest_ns = record.t_ns
        return record

    def restart(self) -> None:
        """Leave out the records up to the newest one."""
        self._given_ns = self._newest_ns


def capped_records(path: Path, cap_bytes: int = CAP_BYTES) -> CappedFile:
    """A file of records, held under `cap_bytes` as `output.log` is."""
    return CappedFile(path, cap_bytes, RECORDS_MARK)


OUTPUT_FILE = "output.log"
LOG_LINES_KEPT, LOG_LINE_CHARACTERS, LOG_WINDOW_BYTES = 400, 2000, 256 << 10
"""Bounds of the end that a screen keeps."""
_BLOCK_BYTES = 1 << 16
_READ_BYTES = 1 << 20
"""The most that one look at a growing log reads."""
_LONGEST_LINE_BYTES = 1 << 16
"""The most that is kept of a line without an end: its newest part."""


MOST_READ_BYTES = 256 << 20
"""Chosen, not measured: four times the cap of a log; a log that is longer was written by nobody here."""


def read_log(
    path: Path, last_lines: int | None = None, most_bytes: int = MOST_READ_BYTES, *, end: int | None = None
) -> list[str]:
    """The last lines of the output, or all of it, without line ends; a hole reads as one line.

    Reads about `most_bytes` before `end` (default: the end of the file), even if that is fewer lines. Control sequences
    are left in, to be removed before the text is shown. Empty without a file.
    """
    try:
        fd = open_regular(path)
    except FileNotFoundError:
        return []
    with os.fdopen(fd, "rb"):
        size = os.fstat(fd).st_size if end is None else end
        length = most_bytes if last_lines is None else min(_BLOCK_BYTES, most_bytes)
        data = _before(fd, size, length)
        while length < min(size, most_bytes) and data.count(b"\n") <= (last_lines or 0):
            length = min(8 * length, most_bytes)
            data = _before(fd, size, length)
    mark = b"\n" + OUTPUT_MARK % b"many"
    # A hole is far longer than zeros that a program has written.
    text = re.sub(rb"\0{65536,}", mark, data.rstrip(b"\0")).replace(b"\0", b"").decode(errors="replace")
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


def _before(fd: int, end: int, length: int) -> bytes:
    """Up to `length` bytes of the file before the offset `end`."""
    begin = max(0, end - length)
    return os.pread(fd, end - begin, begin)

"""JSON-lines files that are written while they are read: appended in one write, read without waiting."""

from __future__ import annotations

import errno
import os
import pwd
import stat
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from trainfast_runner.worker.shared.host import make_private
from trainfast_runner.worker.shared.process import LineFile

T = TypeVar("T")

WINDOW_BYTES = 8 << 20
"""Chosen, not measured: the most that one look at a growing file reads."""
DAMAGE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Errors of damaged JSON; the last one from brackets nested thousands deep."""
BLOCK_BYTES = 512
"""Unit of `st_blocks` (inode(7))."""


class Tail(Generic[T]):
    """Follows a file from its start; each `new()` gives the complete lines that came since the last call.

    A half-written last line waits for its end, a broken line is counted in `unreadable` and skipped, a file that
    does not exist yet is empty. Reads at most `window_bytes` a call, so that a huge file cannot stall its reader.
    A hole is stepped over, with the lines that it cuts, and counted in `hole_bytes`.
    """

    def __init__(self, path: Path, type: type[T], window_bytes: int = WINDOW_BYTES) -> None:
        self.path = path
        self.unreadable = 0
        self.hole_bytes = 0
        self.offset = 0
        self._inode: int | None = None
        self._decoder = msgspec.json.Decoder(type)
        self._window_bytes = window_bytes

    def new(self) -> list[T]:
        """Records that became complete since the last call; an unreadable file raises OSError."""
        try:
            fd = open_regular(self.path)
        except FileNotFoundError:
            return []
        with os.fdopen(fd, "rb", 0):
            status = os.fstat(fd)
            if status.st_size < self.offset or self._inode not in (None, status.st_ino):
                self.offset = 0  # truncated or replaced
                self.restart()
            self._inode = status.st_ino
            chunk = os.pread(fd, self._window_bytes, self.offset)
            if b"\0" in chunk:
                chunk = self._over_hole(fd, chunk)
        end = chunk.rfind(b"\n") + 1
        if end == 0 and len(chunk) == self._window_bytes:
            # One line longer than the window is damage: step over it.
            self.unreadable += 1
            self.offset += len(chunk)
            return []
        self.offset += end
        return list(self._records(chunk[:end]))

    def decode(self, line: bytes) -> T | None:
        """The record of the next line; None if it holds none for this reader. Raises msgspec.DecodeError for damage.

        Override this where lines are not simply a `type` each.
        """
        return self._decoder.decode(line)

    def restart(self) -> None:
        """Note that the file is read from its start again, with records that were given before."""

    def _over_hole(self, fd: int, chunk: bytes) -> bytes:
        """The whole lines before a hole, else the lines after it. Zeros on the disk are no hole."""
        hole_begin = chunk.index(b"\0")
        lines_before = chunk[: chunk.rfind(b"\n", 0, hole_begin) + 1]
        try:
            data_offset = os.lseek(fd, self.offset + hole_begin, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:
                return chunk  # this file system lists no holes
            data_offset = os.fstat(fd).st_size  # nothing follows
        if data_offset == self.offset + hole_begin:
            return chunk
        if lines_before:
            return lines_before
        self.hole_bytes += data_offset - self.offset - hole_begin
        chunk_after = os.pread(fd, self._window_bytes, data_offset)
        first_line_begin = chunk_after.find(b"\n") + 1
        self.offset = data_offset + first_line_begin
        return chunk_after[first_line_begin:]

    def _records(self, chunk: bytes) -> Iterator[T]:
        for line in chunk.split(b"\n"):
            if not line.strip(b" \r\0"):
                continue
            try:
                record = self.decode(line)
            except DAMAGE:
                self.unreadable += 1
            else:
                if record is not None:
                    yield record


def read_all(path: Path, type: type[T]) -> tuple[list[T], int]:
    """Every readable record of a file, and how many lines could not be read."""
    tail = Tail(path, type)
    return list(remaining_records(tail)), tail.unreadable


def remaining_records(tail: Tail[T]) -> Iterator[T]:
    """Every readable record from where the tail is to the end of its file; an unreadable file raises OSError."""
    previous_offset = -1
    while tail.offset != previous_offset:
        previous_offset = tail.offset
        yield from tail.new()


def newest(records: Sequence[object], kind: type[T]) -> T | None:
    """The last record of this type; None without one."""
    return next((record for record in reversed(records) if isinstance(record, kind)), None)


class Appender:
    """Appends records, one `write()` a line, to a file opened O_APPEND by the first. A full disk raises OSError."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: LineFile | None = None

    def write(self, record: msgspec.Struct) -> None:
        """Append one line; None fields become null. The line after one cut short begins on a line of its own."""
        self._file = self._file or LineFile(str(self._path))
        self._file.write_text(msgspec.json.encode(record).decode() + "\n")

    def close(self) -> None:
        """Close the file. Does nothing when it is closed."""
        file, self._file = self._file, None
        if file is not None:
            file.close()


def open_to_append(path: Path) -> int:
    """Return a descriptor to append to the file, which only its owner can read. Raises OSError."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


def read_cached(path: Path, type: type[T]) -> T | None:
    """The content of a file in the cache; None if there is none, or it is damaged."""
    try:
        return msgspec.json.decode(read_regular(path), type=type)
    except (OSError, *DAMAGE):
        return None


def write_cached(path: Path, content: object) -> None:
    """Keep this in the cache if it can be written; without it the same is only computed again."""
    with suppress(OSError):
        make_private(path.parent)
        write_atomically(path, msgspec.json.encode(content))


def write_atomically(path: Path, content: bytes) -> None:
    """Write the whole file or nothing: temporary file, fsync, rename, fsync of the directory."""
    # Two threads may write one path at a time.
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_native_id()}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb", 0):
            view = memoryview(content)
            while view:
                view = view[os.write(fd, view) :]
            os.fsync(fd)
        os.rename(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


MAX_BYTES = 256 << 20
"""Chosen, not measured: more than any file that is read as a whole."""
UNREADABLE = frozenset((errno.EACCES, errno.EPERM, errno.EISDIR, errno.ELOOP, errno.EINVAL, errno.EFBIG, errno.ENXIO))
"""Errors that stay: of another user's file, of one that is not regular, and of one that is too large."""


def open_regular(path: Path | str) -> int:
    """Return the descriptor of a file opened for reading. Raises OSError for all but a regular file."""
    # A pipe without a writer, or a terminal, would wait.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode):
        return fd
    os.close(fd)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "not a regular file", str(path))


def text_of(path: Path) -> str:
    """Return the text of a small file, bytes that are not UTF-8 replaced; empty where it cannot be read."""
    with suppress(OSError):
        return path.read_text("utf-8", errors="replace")
    return ""


def read_regular(path: Path | str) -> bytes:
    """Return the content of a regular file. Raises OSError for any other, and for one of more than MAX_BYTES."""
    fd = open_regular(path)
    try:
        size = os.fstat(fd).st_size
        if size > MAX_BYTES:
            raise OSError(errno.EFBIG, f"larger than {MAX_BYTES >> 20} MiB", str(path))
        return os.read(fd, size + 1)
    finally:
        os.close(fd)


def owner_of(path: Path) -> str:
    """Return the name of the user who owns the file, or the first folder above it that can be looked at."""
    try:
        uid = path.lstat().st_uid
    except OSError:
        return owner_of(path.parent)
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


ENDS = 100
"""Number of records at the start and at the end of a stream that are always kept."""
_GOLDEN = 0x9E3779B97F4A7C15
"""2**64 over the golden ratio: its multiples are spread evenly and share no period with the records."""


def even_share(records: Iterable[tuple[int, T]], one_in: int) -> list[T]:
    """The `ENDS` first and last of numbered records, and evenly one in `one_in` of those between.

    Which ones stay depends on their numbers alone, so that two streams keep the same numbers.
    """
    stream = iter(records)
    kept = [record for _, record in islice(stream, ENDS)]
    last: deque[tuple[int, T]] = deque(maxlen=ENDS)
    for entry in stream:
        if len(last) == ENDS and last[0][0] * _GOLDEN % 2**64 < 2**64 // one_in:
            kept.append(last[0][1])
        last.append(entry)
    return [*kept, *(record for _, record in last)]


def one_in(paths: Iterable[Path], most_bytes: int) -> int:
    """The share of these files' records that is kept to hold no more than about `most_bytes` of them."""
    sizes = (path.stat().st_blocks * BLOCK_BYTES for path in paths if path.is_file())
    return 1 + sum(sizes) // most_bytes

"""A file that grows while its writer lives, held under a size by another process: the output, and step records.

Head and tail are kept, the middle goes: first as a hole in the file, at the end as one line with its size.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

from trainfast_runner.records.json_lines import write_atomically

CAP_BYTES = 64 << 20
"""The cap of `output.log` and of each `steps*.jsonl`."""
_FALLOC_KEEP_SIZE, _FALLOC_PUNCH_HOLE = 0x01, 0x02
"""Flags of fallocate(2), from the kernel's falloc.h."""
_PAGE_BYTES = 1 << 12


def head_of(cap_bytes: int) -> int:
    """Bytes kept from the start of a file under `cap_bytes`; the newest bytes are kept up to the same size."""
    # Whole pages: a part of a page at the edge of a hole would stay on disk.
    return max(_PAGE_BYTES, cap_bytes // 4 // _PAGE_BYTES * _PAGE_BYTES)


HEAD_BYTES = head_of(CAP_BYTES)


def dropped_text(size: str) -> str:
    """The line that replaces dropped bytes of output."""
    return f"[trainfast-tui: {size} bytes of output were dropped here]"


def _dropped_mark(dropped_bytes: int) -> bytes:
    return f"{dropped_text(str(dropped_bytes))}\n".encode()


class CappedFile:
    """Holds the file under `cap_bytes` of kept text: a quarter from the start, the newest quarter from the end.

    `dropped_bytes` counts the bytes dropped; `truncated` is True once the file system could not punch holes, and
    everything after the head was cut instead. `mark` makes the line that stands for dropped bytes in the compacted
    file.
    """

    def __init__(self, path: Path, cap_bytes: int = CAP_BYTES, mark: Callable[[int], bytes] = _dropped_mark) -> None:
        self.path = path
        self._mark = mark
        self.dropped_bytes = 0
        self.truncated = False
        self.cap_bytes = cap_bytes
        self.head_bytes = head_of(cap_bytes)
        self._hole_end = self.head_bytes

    def open(self) -> int:
        """A descriptor to append to the file; only its owner can read the file."""
        return os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def trim(self) -> int:
        """Drop the middle of a file over its cap; return the bytes dropped. Raises OSError."""
        fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        try:
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
        finally:
            os.close(fd)
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
        write_atomically(self.path, head + self._mark(self.dropped_bytes) + tail[whole_lines:])


def _punch(fd: int, start: int, length: int) -> bool:
    """Free the blocks of a range, the size unchanged; False when the file system cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    return int(libc.fallocate(fd, _FALLOC_PUNCH_HOLE | _FALLOC_KEEP_SIZE, start, length)) == 0

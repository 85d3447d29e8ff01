"""The files a rank writes: one JSON object a line, one `write()` a line, never waiting for a reader."""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .oom import is_out_of_memory

if TYPE_CHECKING:
    from .low_memory import Left

TRACEBACK_CHARACTERS = 4000
MOST_KEPT = 64
SETTLE_S = 10.0
"""As long as the supervisor tries to write the result."""


def rank_suffix(rank: int) -> str:
    """Part of a file's name: empty for rank 0, `.rank1` and so on for the others."""
    return "" if rank == 0 else f".rank{rank}"


class RecordFile:
    """An append-only JSON-lines file. Every line is one `os.write` to an O_APPEND descriptor, so lines never mix.

    A disk that takes nothing does not end a training: the line is dropped, or kept for later with `keep` (the newest
    `MOST_KEPT`), and `complain` hears of the first one and of the end of it.
    """

    def __init__(self, path: Path, *, keep: bool = False, complain: Callable[[str], None] | None = None) -> None:
        self._name = path.name
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._waiting: deque[bytes] | None = deque(maxlen=MOST_KEPT) if keep else None
        self._complain = complain
        self._lost = 0
        self._torn = False
        """The last line was cut short: what follows begins on a line of its own."""

    @property
    def is_behind(self) -> bool:
        """Whether lines wait to be written."""
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
        """Write the lines that wait, as far as that goes."""
        while self._waiting and self._put(self._waiting[0]):
            self._waiting.popleft()

    def _put(self, line: bytes) -> bool:
        """Whether the whole line is in the file."""
        line = b"\n" + line if self._torn else line
        try:
            written = os.write(self._fd, line)
        except OSError as error:
            self._lose(error.strerror)
            return False
        self._torn = written < len(line)
        if self._torn:
            self._lose("it took only a part of a line")
            return False
        if self._lost and self._complain is not None:
            lost, self._lost = self._lost, 0
            self._complain(f"{self._name} can be written again: {lost} lines are missing")
        return True

    def _lose(self, why: str | None) -> None:
        self._lost += 1
        if self._lost == 1:
            sentence = f"{self._name} cannot be written: {why}; the training goes on"
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


class Journal:
    """`worker.jsonl`: what actually ran, and how it ended. `phase` and `step` say where the rank is now."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        self.rank = rank
        self.phase = "import"
        self.step: int | None = None
        self.held_bytes: int | None = None
        """The most memory the training held in the phase it failed in, where it failed."""
        self.left: Left | None = None
        """Memory left on the devices when the training failed; None when unknown."""
        self._file = RecordFile(run_dir / f"worker{rank_suffix(rank)}.jsonl", keep=True)

    def write(self, kind: str, **fields: Any) -> None:
        """Append one record of `kind`, stamped with CLOCK_MONOTONIC nanoseconds."""
        self._file.write({"t_ns": time.monotonic_ns(), "kind": kind, **fields})

    def trouble(self, detail: str) -> None:
        """Say what went wrong beside the training, which goes on."""
        self.write("trouble", rank=self.rank, detail=detail)

    def settle(self, patience_s: float = SETTLE_S) -> None:
        """Wait for the disk to take what has not been written yet: without its last words a rank is a lost one."""
        deadline = time.monotonic() + patience_s
        while self._file.is_behind and time.monotonic() < deadline:
            time.sleep(0.1)
            self._file.catch_up()

    def enter(self, phase: str, detail: str = "") -> None:
        """Say that a phase begins: import, data, model or train."""
        self.phase = phase
        self.write("phase", phase=phase, detail=detail)

    def exception(self, error: BaseException) -> None:
        """Write the `exception` record: type, message, the chain of causes, and whether memory ran out."""
        chain = exception_chain(error)
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        self.write(
            "exception",
            rank=self.rank,
            phase=self.phase,
            step=self.step,
            held_bytes=self.held_bytes,
            free_bytes=None if self.left is None else self.left.free_bytes,
            type=chain[0]["type"],
            message=chain[0]["message"],
            chain=chain,
            traceback=text[-TRACEBACK_CHARACTERS:],
            is_oom=is_out_of_memory(
                (f"{link['type']}: {link['message']}" for link in chain),
                memory_is_low=self.left is not None and self.left.is_low,
            ),
        )


def exception_chain(error: BaseException) -> list[dict[str, str]]:
    """The error and its causes, outermost first, as `{type, message}`; types outside builtins carry their module."""
    chain: list[dict[str, str]] = []
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        kind = type(link)
        name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        chain.append({"type": name, "message": str(link)[:2000]})
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return chain


def hold_alive_lock(run_dir: Path) -> int:
    """Take the run's shared lock for the life of this process; returns the descriptor, which is never closed."""
    fd = os.open(run_dir / "alive.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(fd, fcntl.LOCK_SH)
    return fd


def start_ticks() -> int:
    """When this process started, in clock ticks since boot (field 22 of `/proc/self/stat`): tells pids apart."""
    stat = Path("/proc/self/stat").read_text()
    return int(stat.rpartition(")")[2].split()[19])

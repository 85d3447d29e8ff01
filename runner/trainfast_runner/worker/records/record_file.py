"""An append-only file of JSON lines: one `write()` a line, never waiting for a reader."""

import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..memory.allocator import DeviceMemory
from ..shared.memory_limit import is_out_of_memory
from ..shared.process import LineFile, exception_fields, rank_suffix

MAX_KEPT_LINES = 64
"""Chosen, not measured: the most lines that wait for a full disk; a run has few lines that are kept."""


class RecordFile:
    """A file of JSON lines that a full disk does not take: the training goes on.

    A line is dropped, or with `keep` kept for later, among the newest `MAX_KEPT_LINES`. `complain` is called with the
    first failure, and when the file can be written again.
    """

    def __init__(self, path: Path, *, keep: bool = False, complain: Callable[[str], None] = lambda _: None) -> None:
        self._file = LineFile(str(path))
        self._keeps = keep
        self._waiting: deque[dict[str, Any]] = deque(maxlen=MAX_KEPT_LINES)
        self._complain = complain
        self._lost = 0

    @property
    def is_behind(self) -> bool:
        """True if lines wait to be written."""
        return bool(self._waiting)

    def write(self, record: dict[str, Any]) -> None:
        """Append `record` after the waiting ones; a value JSON cannot hold (NaN, infinity) becomes null."""
        self._waiting.append(record)
        self.catch_up()
        if not self._keeps:
            self._waiting.clear()

    def catch_up(self) -> None:
        """Write the waiting lines until one cannot be written."""
        try:
            while self._waiting:
                self._file.write(self._waiting[0])
                self._waiting.popleft()
        except OSError as error:
            self._lost += 1
            if self._lost == 1:
                sentence = f"{self._file.name} cannot be written: {error.strerror}; the training goes on"
                # The output is on the same disk, and may take nothing either.
                with suppress(OSError):
                    print(sentence, file=sys.stderr)
                self._complain(sentence)
            return
        if self._lost:
            lost_count, self._lost = self._lost, 0
            self._complain(f"{self._file.name} can be written again: {lost_count} lines are missing")


SETTLE_S = 10.0
"""Seconds for retries, as long as the supervisor tries to write the result."""
RETRY_EVERY_S = 0.1
"""Seconds between retries: someone has to free space meanwhile."""


class WorkerLog:
    """Appends to `worker.jsonl`, or to the file of this rank.

    `phase` and `step` are those the rank is in now, for the record of an exception.
    """

    def __init__(self, run_dir: Path, rank: int) -> None:
        self.rank = rank
        self.phase = "import"
        self.step: int | None = None
        self.held_bytes: int | None = None
        """Peak of the phase in which the training failed; None before it fails."""
        self.available: DeviceMemory | None = None
        """Available memory of the devices when the training failed; None when unknown."""
        self._file = RecordFile(run_dir / f"worker{rank_suffix(rank)}.jsonl", keep=True)

    def write(self, kind: str, **fields: Any) -> None:
        """Append one record of `kind`, stamped with CLOCK_MONOTONIC nanoseconds."""
        self._file.write({"t_ns": time.monotonic_ns(), "kind": kind, **fields})

    def trouble(self, detail: str) -> None:
        """Record an error outside of the training, which goes on."""
        self.write("trouble", rank=self.rank, detail=detail)

    def settle(self) -> None:
        """Wait until the disk takes the waiting lines: a rank without its last record counts as lost."""
        deadline = time.monotonic() + SETTLE_S
        while self._file.is_behind and time.monotonic() < deadline:
            time.sleep(RETRY_EVERY_S)
            self._file.catch_up()

    def enter(self, phase: str, detail: str = "") -> None:
        """Record that a phase begins: import, data, compile (an extension), model or train."""
        self.phase = phase
        self.write("phase", phase=phase, detail=detail)

    def exception(self, error: BaseException) -> None:
        """Write the `exception` record: type, message, the chain of causes, and whether memory ran out."""
        fields = exception_fields(error)
        self.write(
            "exception",
            rank=self.rank,
            phase=self.phase,
            step=self.step,
            held_bytes=self.held_bytes,
            free_bytes=None if self.available is None else self.available.free_bytes,
            **fields,
            is_oom=chain_is_oom(fields["chain"], self.available),
        )


def chain_is_oom(chain: list[dict[str, str]], available: DeviceMemory | None) -> bool:
    """True if any link of an exception chain reports an OOM, or hints at one when little memory was `available`."""
    memory_is_low = available is not None and available.is_low
    return is_out_of_memory((f"{link['type']}: {link['message']}" for link in chain), memory_is_low=memory_is_low)

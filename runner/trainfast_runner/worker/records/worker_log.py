"""`worker.jsonl`, in which each rank records its phases, its live objects and its end."""

from __future__ import annotations

import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..shared.oom import is_out_of_memory
from .record_file import RecordFile, rank_suffix

if TYPE_CHECKING:
    # The module imports torch, and this file is imported before torch.
    from ..memory.available_memory import DeviceMemory

TRACEBACK_CHARACTERS, MESSAGE_CHARACTERS = 4000, 2000
"""Kept equal to the door's (`ending.py`): the door imports nothing of the worker while a script runs."""
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
        chain = exception_chain(error)
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        self.write(
            "exception",
            rank=self.rank,
            phase=self.phase,
            step=self.step,
            held_bytes=self.held_bytes,
            free_bytes=None if self.available is None else self.available.free_bytes,
            type=chain[0]["type"],
            message=chain[0]["message"],
            chain=chain,
            traceback=text[-TRACEBACK_CHARACTERS:],
            is_oom=chain_is_oom(chain, self.available),
        )


def exception_chain(error: BaseException) -> list[dict[str, str]]:
    """The error and its causes, outermost first, as `{type, message}`; types outside builtins carry their module."""
    chain: list[dict[str, str]] = []
    seen_ids: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen_ids:
        seen_ids.add(id(link))
        kind = type(link)
        name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        chain.append({"type": name, "message": str(link)[:MESSAGE_CHARACTERS]})
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return chain


def chain_is_oom(chain: list[dict[str, str]], available: DeviceMemory | None) -> bool:
    """True if any link of an exception chain reports an OOM, or hints at one when little memory was `available`."""
    memory_is_low = available is not None and available.is_low
    return is_out_of_memory((f"{link['type']}: {link['message']}" for link in chain), memory_is_low=memory_is_low)

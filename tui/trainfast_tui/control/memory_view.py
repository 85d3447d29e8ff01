"""Contents of the memory bar: the predicted peak beside its limit, or why there is none, and the measured peak."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainfast_tui.text.format import size

if TYPE_CHECKING:
    from trainfast_runner.machine.devices import Machine
    from trainfast_runner.memory.available import RankLimit


@dataclass(frozen=True, slots=True)
class PredictedPeak:
    """The predicted peak of one rank. `parts` are (category, bytes) at the peak of `phase`.

    `context_bytes` comes on top of `total_bytes`, the allocator's peak; None where it is unknown or on a CPU.
    """

    total_bytes: int
    parts: tuple[tuple[str, int], ...]
    phase: str
    batch_size: int
    room: RankLimit | None = None
    max_batch: int | None = None
    context_bytes: int | None = None
    basis: str = ""
    attention: str = ""
    """The model's attention kernel, and why `attention=auto` takes it; empty if no trace names it."""
    margin_bytes: int = 0
    """Memory that has to stay free beside the peak for the run to survive."""
    cannot_run: str = ""
    """Why this machine cannot run it, whatever the memory; empty if it can."""

    @property
    def needed_bytes(self) -> int:
        """Bytes that have to fit into the available memory."""
        context = self.context_bytes if self.room is not None and self.room.with_context else None
        return self.total_bytes + self.margin_bytes + (context or 0)

    @property
    def headroom_bytes(self) -> int | None:
        """Available memory that would be left; negative if the run does not fit, None while the limit is unknown."""
        return None if self.room is None else self.room.limit_bytes - self.needed_bytes


def swap_notice(predicted: PredictedPeak | None, machine: Machine | None) -> str:
    """Warn of a run on a CPU that is predicted to need more memory than is free; empty if there is no risk.

    A GPU only refuses what does not fit, and so does a `memory_limit` below the free memory. A machine swaps.
    """
    if predicted is None or predicted.room is None or machine is None or machine.device != "cpu":
        return ""
    left = predicted.headroom_bytes
    if left is None or left >= 0 or predicted.room.is_memory_limit:
        return ""
    return (
        f"Predicted to need {size(predicted.needed_bytes)} of {size(predicted.room.limit_bytes)}"
        f" ({predicted.room.words}): {size(-left)} too much. The machine would swap, or the kernel end a process;"
        " with memory_limit the run alone would end."
    )


def importing(executable: str) -> str:
    """The reason a trace waits while this Python imports the training stack; empty once imported."""
    return f"importing torch and transformers in {executable} (first time: some seconds)" if executable else ""


@dataclass(frozen=True, slots=True)
class Measured:
    """The worst rank's peak in the run on the screen, and the peak that was predicted for that run."""

    peak_bytes: int
    predicted_bytes: int | None
    same_knobs: bool
    """True if the next run repeats that run, so that both predictions are about the same settings."""


@dataclass(frozen=True, slots=True)
class MemoryView:
    """A prediction, or else `words` that say why there is none (yet); and a measurement where there is one."""

    predicted: PredictedPeak | None = None
    words: str = ""
    failed: bool = False
    """True if `words` say that there will be no prediction."""
    since_ns: int | None = None
    """CLOCK_MONOTONIC at which the trace under way began."""
    measured: Measured | None = None

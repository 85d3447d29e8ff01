"""What the memory bar shows: the predicted peak beside its limit, or why there is none, and what was measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainfast_tui.text.format import size

if TYPE_CHECKING:
    from trainfast_runner.machine.devices import Machine
    from trainfast_runner.memory.available import Room


@dataclass(frozen=True, slots=True)
class Forecast:
    """The predicted peak of one rank. `parts` are (category, bytes) as they stand at the peak of `phase`.

    `context_bytes` comes on top of `total_bytes`, which is the allocator's peak; None where it is unknown or a CPU's.
    """

    total_bytes: int
    parts: tuple[tuple[str, int], ...]
    phase: str
    batch_size: int
    room: Room | None = None
    max_batch: int | None = None
    context_bytes: int | None = None
    basis: str = ""
    attention: str = ""
    """The model's attention kernel, and why `attention=auto` takes it; empty where no trace says so."""
    margin_bytes: int = 0
    """What has to stay free beside the peak for the run to survive in the room."""
    cannot_run: str = ""
    """Why this machine cannot run it, whatever the memory; empty where it can."""

    @property
    def needed_bytes(self) -> int:
        """What has to fit in the room."""
        context = self.context_bytes if self.room is not None and self.room.with_context else None
        return self.total_bytes + self.margin_bytes + (context or 0)

    @property
    def headroom_bytes(self) -> int | None:
        """What is left of the room; negative where it does not fit."""
        return None if self.room is None else self.room.limit_bytes - self.needed_bytes


def swap_notice(forecast: Forecast | None, machine: Machine | None) -> str:
    """What a run risks that is predicted to need more than a CPU's memory has free; empty where it risks nothing.

    A GPU only refuses what does not fit, and so does a `memory_limit` below what is free. A machine swaps.
    """
    if forecast is None or forecast.room is None or machine is None or machine.device != "cpu":
        return ""
    left = forecast.headroom_bytes
    if left is None or left >= 0 or forecast.room.is_memory_limit:
        return ""
    return (
        f"It is predicted to need {size(forecast.needed_bytes)} of {size(forecast.room.limit_bytes)}"
        f" ({forecast.room.words}): {size(-left)} too much. The machine would swap, or the kernel end a process;"
        " with memory_limit the run alone would end."
    )


def importing(executable: str) -> str:
    """The reason a trace waits while this Python imports the training stack; empty once imported."""
    return f"importing torch and transformers in {executable} (first time: some seconds)" if executable else ""


@dataclass(frozen=True, slots=True)
class Measured:
    """The worst rank's peak in the run on the screen, and what was predicted for it.

    `same_knobs`: whether the next run is that run again, so that the forecast is about the same thing.
    """

    peak_bytes: int
    predicted_bytes: int | None
    same_knobs: bool


@dataclass(frozen=True, slots=True)
class MemoryView:
    """A forecast, or else `words` that say why there is none (yet); and a measurement where there is one."""

    forecast: Forecast | None = None
    words: str = ""
    failed: bool = False
    """Whether `words` say that there will be none."""
    since_ns: int | None = None
    """CLOCK_MONOTONIC at which the trace that is under way began."""
    measured: Measured | None = None

"""The waits before a process trains or traces, in words: imports, GPUs that are too warm, the model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainfast_tui.text.format import celsius, duration, plain

if TYPE_CHECKING:
    from trainfast_runner.search.journal.lines import CoolingDown

START_WORDS = {
    "import": "importing the training stack",
    "data": "preparing the data",
    "compile": "compiling an extension",
    "model": "building the model",
    "train": "first step",
}
"""Words by the phase that the worker writes."""


def start_words(phase: str, detail: str | None) -> str:
    """Return the phase of a run without steps, with its detail, in words."""
    words = START_WORDS.get(phase, phase or "starting the training process")
    return words + (f" ({detail})" if detail else "")


def importing_words(executable: str) -> str:
    """Return the reason a trace waits while this Python imports the training stack; empty once imported."""
    return f"importing torch and transformers in {executable} (first time: some seconds)" if executable else ""


def cooling_words(device: int, temperature_c: float, below_c: float, waited_s: float, stuck_s: float) -> str:
    """Return the hottest GPU's temperature, the awaited temperature, and the seconds waited and without change."""
    from trainfast_runner.machine.cooling import stuck_text

    return (
        f"cooling GPU {device}: {celsius(temperature_c)}, waiting for less than {celsius(below_c)},"
        f" {duration(waited_s)} so far{stuck_text(stuck_s)}"
    )


def wait_words(cooling: CoolingDown | None, waits_for: str | None, now_ns: int | None) -> str:
    """Return the wait of a live search at `now_ns` (CLOCK_MONOTONIC): for cooler GPUs, or the run `waits_for`.

    Empty if it waits for neither.
    """
    if cooling is not None:
        return search_cooling_words(cooling, now_ns)
    return f"waiting for {plain(waits_for)} to end" if waits_for is not None else ""


def search_cooling_words(reading: CoolingDown, now_ns: int | None) -> str:
    """Describe the wait of a search at `now_ns` (CLOCK_MONOTONIC), or at its newest reading."""
    # The journal has a line where the temperature changes, and none while it stands still.
    since_s = max(0, now_ns - reading.t_ns) / 1e9 if now_ns is not None else 0.0
    return cooling_words(
        reading.device, reading.temperature_c, reading.below_c, reading.waited_s + since_s, reading.stuck_s + since_s
    )

"""The one sentence about GPUs that are still too warm for `--cool-to`."""

from __future__ import annotations

from trainfast_tui.text.format import celsius, duration


def cooling_words(device: int, temperature_c: float, below_c: float, waited_s: float, stuck_s: float) -> str:
    """Return the hottest GPU's temperature, the one waited for, and how long it has taken and stood still."""
    from trainfast_runner.machine.cooling import stuck_words

    return (
        f"cooling GPU {device}: {celsius(temperature_c)}, waiting for less than {celsius(below_c)},"
        f" {duration(waited_s)} so far{stuck_words(stuck_s)}"
    )

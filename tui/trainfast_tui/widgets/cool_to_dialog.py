"""The question below which temperature the GPUs of each run are to be before it starts."""

from __future__ import annotations

import math
from collections.abc import Callable

from trainfast_runner.errors import UserError
from trainfast_runner.machine.cooling import HIGHEST_C, LOWEST_C
from trainfast_tui.control.run_control import RunControl
from trainfast_tui.widgets.dialogs import Ask

ALLOWED = f"{LOWEST_C:g} to {HIGHEST_C:g} degrees Celsius"
HINT = (
    f"{ALLOWED}: each run, and each process of a search, waits until its GPUs are below it, so that all begin alike."
    " Empty: no wait."
)


def cool_to_dialog(runs: RunControl, notify: Callable[[str], None]) -> Ask:
    """Return the dialog that sets `runs.cool_to_c`."""

    def on_answer(text: str) -> None:
        wait = runs.cool_to_c = _degrees(text)
        notify("Runs start at once." if wait is None else f"Each run waits until its GPUs are below {wait:g} °C.")

    current = "" if runs.cool_to_c is None else f"{runs.cool_to_c:g}"
    return Ask("Start runs below", HINT, current, on_answer)


def _degrees(text: str) -> float | None:
    """Parse a temperature in degrees Celsius; None if the text is empty. Raises UserError."""
    text = text.strip().removesuffix("C").removesuffix("°").strip()
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not LOWEST_C <= value <= HIGHEST_C:
        raise UserError(f"{text} is no temperature to wait for", key="cool to", allowed=[ALLOWED])
    return value

"""The question for the temperature that the GPUs must fall below before a run starts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from textual.app import App

from trainfast_runner.errors import UserError
from trainfast_runner.machine.cooling import HIGHEST_C, LOWEST_C
from trainfast_tui.control.run_control import RunControl
from trainfast_tui.widgets.dialogs.ask import ask_text

ALLOWED_RANGE = f"{LOWEST_C:g} to {HIGHEST_C:g} degrees Celsius"
HINT = (
    f"{ALLOWED_RANGE}: each run, and each process of a search, waits until its GPUs are below it, so that all begin"
    " alike. Empty: no wait."
)


def ask_cool_to(app: App[Any], run_control: RunControl, notify: Callable[[str], None]) -> None:
    """Ask for `run_control.cool_to_c`, and notify of its effect."""

    def set_cool_to(text: str) -> None:
        below_c = run_control.cool_to_c = _degrees(text)
        notify("Runs start at once." if below_c is None else f"Each run waits until its GPUs are below {below_c:g} °C.")

    current = "" if run_control.cool_to_c is None else f"{run_control.cool_to_c:g}"
    ask_text(app, "Start runs below", HINT, current, set_cool_to)


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
        raise UserError(f"{text} is not a temperature to wait for", key="cool to", allowed=[ALLOWED_RANGE])
    return value

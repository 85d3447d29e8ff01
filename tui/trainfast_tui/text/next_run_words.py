"""The next run in words: its predicted speed, its overrides, and the flags found in a script of the user's own."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len

from trainfast_runner.records.result import MIN_STEPS_TO_COMPARE
from trainfast_runner.units import counted
from trainfast_tui.text.format import interval, number, percent_change, plain, signed_percent, truncate

if TYPE_CHECKING:
    from trainfast_runner.records.run_file import Discovered, Flag, PredictedSpeed


SAMPLES_VARY = "mean: steps differ in size"
"""The remark on a rate of steps that differ in size."""


def speed_text(speed: PredictedSpeed) -> str:
    """Return a rate and its 90 % interval: `14.2 samples/s (12.9 to 15.6)`."""
    return f"{number(speed.median)} samples/s ({interval(speed.low, speed.high)})"


def few_steps_note(measured: int) -> str:
    """Return the remark on a speed of so few steps; empty if no step or enough steps were measured."""
    if not 0 < measured < MIN_STEPS_TO_COMPARE:
        return ""
    return "1 timed step" if measured == 1 else "few steps"


def against_predicted_speed(measured: float | None, speed: PredictedSpeed) -> str:
    """Return the prediction and its error: `predicted 14.2 samples/s (12.9 to 15.6), +3.1 %`."""
    words = f"predicted {speed_text(speed)}"
    if measured is None or not speed.median:
        return plain(words)
    return plain(f"{words}, {signed_percent(percent_change(measured, speed.median))}")


def typed_overrides(overrides: Mapping[str, Any]) -> list[str]:
    """Return each override as `knob=value`, `model.FIELD=value` or `data.FIELD=value`."""
    from trainfast_runner.settings.knobs import KNOBS_BY_NAME

    text_of = {key: KNOBS_BY_NAME[key].text_of if key in KNOBS_BY_NAME else field_text for key in overrides}
    return [f"{key}={text_of[key](value)}" for key, value in overrides.items()]


def short_overrides(overrides: Mapping[str, Any], cells: int) -> str:
    """Return as many whole overrides as fit in `cells`, else the first one cut, and how many more there are.

    Knobs come first: runs that are compared differ in them, and have the model's fields in common.
    """
    words = typed_overrides(dict(sorted(overrides.items(), key=lambda override: "." in override[0])))
    for shown in range(len(words), 0, -1):
        hidden = f" +{len(words) - shown}" if shown < len(words) else ""
        text = " ".join(words[:shown]) + hidden
        if cell_len(text) <= cells:
            return text
    if not words:
        return ""
    hidden = f" +{len(words) - 1}" if len(words) > 1 else ""
    return truncate(words[0], cells - len(hidden)) + hidden


def field_text(value: Any, between: str = "+") -> str:
    """Return the value of a model or data field, with `between` between the entries of a list."""
    if isinstance(value, list):
        return between.join(field_text(entry, between) for entry in value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def warning_words(command: Sequence[str]) -> str:
    """Return what is about to run, and what it may do."""
    return (
        f"running {plain(shlex.join(command))} up to its argument parser, to find its flags;"
        " whatever it does before that, such as deleting or writing files, is done"
    )


def discovery_words(discovered: Discovered) -> str:
    """Return where discovery stopped the script, its parser, and the number of its flags."""
    kind = f"{discovered.parser}, " if discovered.parser else ""
    return f"stopped at {discovered.stopped_at}: {kind}{counted(len(discovered.flags), 'flag')}"


def default_words(flag: Flag) -> str:
    """Return the default of a flag; empty without one."""
    return plain("" if flag.default is None else str(flag.default))

"""Settings as they are typed: `KNOB=VALUE`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from trainfast_runner.errors import UserError
from trainfast_runner.settings.knob_values import KnobValue
from trainfast_runner.settings.knobs import knob


def split_setting(text: str, option: str, form: str) -> tuple[str, str]:
    """Return the name and the value of a setting of this `option`, which takes this `form`. Raises UserError."""
    name, equals, value = text.partition("=")
    name = name.strip()
    if not equals or not name:
        raise UserError(f"{option} takes {form}, not {text!r}", key=name or text)
    return name, value


def setting_of(setting: str) -> tuple[str, KnobValue]:
    """Return the knob and the value of `KNOB=VALUE`. Raises UserError."""
    name, value = split_setting(setting, "--set", "knob=value")
    return name, knob(name).read(value.strip())


def settings_of(knobs: Mapping[str, KnobValue], overrides: Iterable[str]) -> list[str]:
    """The overrides of a script's knobs, as they are typed after `--set`."""
    return [f"{name}={knob(name).text_of(knobs[name])}" for name in overrides]


Vary = Mapping[str, Sequence[KnobValue]]
"""The values of each varied knob, each once."""


def read_vary(texts: Iterable[str]) -> dict[str, list[KnobValue]]:
    """Return the values of each `knob=a,b,c`, read by its knob. Raises UserError, also for a knob given twice."""
    varied: dict[str, list[KnobValue]] = {}
    for text in texts:
        name, values = split_setting(text, "--vary", "knob=a,b,c")
        entry = knob(name)
        if name in varied:
            earlier_values = ",".join(map(entry.text_of, varied[name]))
            raise UserError(
                f"--vary {name} is given twice", key=name, advice=f"--vary {name}={earlier_values},{values}"
            )
        if not values.strip(" ,"):
            raise UserError(f"--vary {text}: no value", key=name, allowed=[entry.values.describe()])
        varied[name] = list(dict.fromkeys(entry.read(value.strip()) for value in values.split(",")))
    return varied


def combinations_of(vary: Vary) -> Iterator[dict[str, KnobValue]]:
    """Yield every combination of the varied values."""
    for values in itertools.product(*vary.values()):
        yield dict(zip(vary, values, strict=True))


def fewest_to_drop(vary: Vary, count: int, max_count: int) -> tuple[list[str], int]:
    """Return the fewest knobs without which `count` combinations become at most `max_count`, and how many are left."""
    combinations, dropped_knobs = count, []
    for name, values in sorted(vary.items(), key=lambda item: -len(item[1])):
        if combinations <= max_count:
            break
        combinations = math.ceil(combinations / len(values))
        dropped_knobs.append(name)
    return dropped_knobs, combinations

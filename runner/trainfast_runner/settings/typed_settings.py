"""Settings as they are typed: `KNOB=VALUE`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

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

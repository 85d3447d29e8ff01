"""`[script]` of a preset file: the command of a user's own script, and the flags that take its knobs.

schema = 1
[script]
command = ["python", "train.py"]        # `run --preset FILE` without a command starts it
[script.knobs]
batch_size = "--per_device_train_batch_size {}"
precision = { bf16 = "--bf16", fp32 = "" }
[knobs]
batch_size = 16
"""

from __future__ import annotations

import shlex
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainfast_runner.errors import UserError, nearest
from trainfast_runner.settings.knob_type import KnobValues
from trainfast_runner.settings.knob_values import KnobValue
from trainfast_runner.settings.knobs import knob
from trainfast_runner.settings.toml_places import line_of

TOP_KEYS = ("schema", "title", "script", "knobs")
SCRIPT_KEYS = ("command", "knobs")

Place = str | dict[str, str]
"""Words of the command with {} for the value, or the words by value."""


@dataclass(frozen=True)
class ScriptPreset:
    """A script's command as words, the place of each knob in it, and the knobs to set."""

    command: tuple[str, ...] = ()
    places: dict[str, Place] = field(default_factory=dict)
    knobs: KnobValues = field(default_factory=dict)

    def applied(self, words: list[str], knobs: KnobValues) -> list[str]:
        """The command with the flags of these knobs; a flag that it has already gets the value. Raises UserError."""
        for name, value in knobs.items():
            if name in self.places:
                words = _with_flag(words, _words(name, self.places[name], value))
        return words


def load(path: str) -> ScriptPreset:
    """Read a preset file that has `[script]`. Raises UserError naming file, line and key."""
    file = Path(path).expanduser()
    try:
        text = file.read_text(encoding="utf-8")
        raw = tomllib.loads(text)
    except OSError as error:
        raise UserError(f"cannot read preset {file}: {error.strerror}", key="--preset") from None
    except ValueError as error:
        raise UserError(f"{file}: not valid TOML: {error}", key="--preset") from None
    reader = _Reader(file, text)
    reader.known(raw, TOP_KEYS, ())
    if raw.get("schema") != 1:
        raise reader.problem("schema must be 1", ("schema",))
    script = reader.table(raw, "script", ())
    reader.known(script, SCRIPT_KEYS, ("script",))
    places = reader.table(script, "knobs", ("script",))
    for name, place in places.items():
        at = ("script", "knobs", name)
        reader.knob(name, at)
        texts = list(place.values()) if isinstance(place, dict) else [place]
        if not all(isinstance(one, str) for one in texts) or (isinstance(place, str) and "{}" not in place):
            raise reader.problem(f"{name} needs words with {{}} for its value, or a table of words by value", at)
    return ScriptPreset(
        tuple(reader.command(script)),
        places,
        {name: reader.value(name, value) for name, value in reader.table(raw, "knobs", ()).items()},
    )


def _words(name: str, place: Place, value: KnobValue) -> list[str]:
    shown = knob(name).show(value)
    if isinstance(place, str):
        return [word.replace("{}", shown) for word in shlex.split(place)]
    if shown not in place:
        raise UserError(f"{name}={shown} has no words in [script.knobs]", key=name, allowed=place)
    return shlex.split(place[shown])


def _with_flag(words: list[str], flag: list[str]) -> list[str]:
    """`words` with the flag: in place of the same one, else at the end."""
    if not flag:
        return words
    name, equals, value = flag[0].partition("=")
    for place, word in enumerate(words):
        if equals and (word == name or word.startswith(f"{name}=")):
            return [*words[:place], f"{name}={value}", *words[place + (2 if word == name else 1) :]]
        if not equals and word == name:
            return [*words[:place], *flag, *words[place + len(flag) :]]
        if not equals and len(flag) == 2 and word.startswith(f"{name}="):
            return [*words[:place], f"{name}={flag[1]}", *words[place + 1 :]]
    return [*words, *flag]


@dataclass(frozen=True)
class _Reader:
    file: Path
    text: str

    def problem(self, message: str, at: tuple[str, ...], **more: Any) -> UserError:
        line = line_of(self.text, at)
        where = f"{self.file}:{line}" if line else str(self.file)
        return UserError(message, key=".".join(at), where=where, **more)

    def known(self, table: dict[str, Any], allowed: tuple[str, ...], at: tuple[str, ...]) -> None:
        for key in table:
            if key not in allowed:
                near = nearest(key, allowed)
                raise self.problem(f"unknown key {key!r}", (*at, key), allowed=allowed, nearest=near)

    def table(self, raw: dict[str, Any], key: str, at: tuple[str, ...]) -> dict[str, Any]:
        value = raw.get(key, {})
        if not isinstance(value, dict):
            raise self.problem(f"{key} must be a table, not {value!r}", (*at, key))
        return value

    def command(self, script: dict[str, Any]) -> list[str]:
        words = script.get("command", [])
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise self.problem("command must be a list of words", ("script", "command"))
        return words

    def knob(self, name: str, at: tuple[str, ...]) -> None:
        try:
            knob(name)
        except UserError as problem:
            raise self.problem(problem.message, at, allowed=problem.allowed, nearest=problem.nearest) from None

    def value(self, name: str, value: object) -> KnobValue:
        try:
            return knob(name).read(value)
        except UserError as problem:
            at = ("knobs", name)
            raise self.problem(problem.message, at, allowed=problem.allowed, nearest=problem.nearest) from None

"""`[script]` of a preset file: the command of a user's own script, and the flags that take its knobs.

schema = 1
title = "my training"
[script]
command = ["python", "train.py"]        # `run NAME` starts it
cwd = "/home/me/project"                # the folder that it starts in
framework = "accelerate"                # what trains, if discovery found it: some knobs need no flag then
[script.knobs]
batch_size = "--per_device_train_batch_size {}"
precision = { bf16 = "--bf16", fp32 = "" }
[knobs]
batch_size = 16
"""

from __future__ import annotations

import re
import shlex
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainfast_runner.errors import UserError, nearest
from trainfast_runner.records.discovered import FRAMEWORKS
from trainfast_runner.settings import presets
from trainfast_runner.settings.knob_type import KnobValues
from trainfast_runner.settings.knob_values import KnobValue
from trainfast_runner.settings.knobs import knob
from trainfast_runner.settings.toml_places import line_of

TOP_KEYS = ("schema", "title", "script", "knobs")
SCRIPT_KEYS = ("command", "cwd", "framework", "knobs")
FLAG = re.compile(r"-{1,2}[A-Za-z]")
"""The beginning of a flag; `-1` is a number."""

NOTHING = "nothing"
"""Stands for no words where a place is shown or typed."""

Place = str | dict[str, str]
"""Words of the command with {} for the value, or the words by value."""


@dataclass(frozen=True)
class ScriptPreset:
    """A script's command as words, the place of each knob in it, and the knobs to set.

    `name` is the preset's and `file` its file, empty for a command as typed; `cwd` the folder that the command starts
    in, empty for the one that it is typed in; `framework` one of `FRAMEWORKS`, empty if it is unknown.
    """

    command: tuple[str, ...] = ()
    places: dict[str, Place] = field(default_factory=dict)
    knobs: KnobValues = field(default_factory=dict)
    name: str = ""
    title: str = ""
    cwd: str = ""
    framework: str = ""
    file: str = ""

    def applied(self, words: list[str], knobs: KnobValues) -> list[str]:
        """The command with the flags of these knobs; a flag that it has already gets the value. Raises UserError."""
        for name, value in knobs.items():
            if name not in self.places:
                continue
            place = self.places[name]
            flags = _flags(words_of(name, place, value))
            ours = {_name(flag) for flag in flags}
            texts = place.values() if isinstance(place, dict) else ()
            # The flags of another value would contradict these.
            for other in (
                flag for text in texts for flag in _flags(split_words(text, name)) if _name(flag) not in ours
            ):
                words = _without_flag(words, other)
            for flag in flags:
                words = _with_flag(words, flag)
        return words


def path_of(reference: str) -> Path | None:
    """The file of a preset that has `[script]`, by its name or path; None for any other, also an unreadable one."""
    if reference.endswith(".toml"):
        path: Path | None = Path(reference).expanduser()
    else:
        path = presets.preset_files().get(reference)
    if path is None:
        return None
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return path if "script" in raw else None


def load(path: str | Path) -> ScriptPreset:
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
        raise reader.error_at("schema must be 1", ("schema",))
    script = reader.table(raw, "script", ())
    reader.known(script, SCRIPT_KEYS, ("script",))
    places = reader.table(script, "knobs", ("script",))
    for name, place in places.items():
        at = ("script", "knobs", name)
        reader.knob(name, at)
        texts = list(place.values()) if isinstance(place, dict) else [place]
        if not all(isinstance(one, str) for one in texts) or (isinstance(place, str) and "{}" not in place):
            raise reader.error_at(f"{name} needs words with {{}} for its value, or a table of words by value", at)
        reader.place(name, place, at)
    cwd = reader.words(script, "cwd", ("script",))
    framework = reader.words(script, "framework", ("script",))
    if framework and framework not in FRAMEWORKS:
        raise reader.error_at(f"there is no framework {framework!r}", ("script", "framework"), allowed=FRAMEWORKS)
    return ScriptPreset(
        tuple(reader.command(script)),
        places,
        {name: reader.value(name, value) for name, value in reader.table(raw, "knobs", ()).items()},
        name=file.stem,
        title=reader.words(raw, "title", ()),
        cwd=str((file.parent / Path(cwd).expanduser()).resolve()) if cwd else "",
        framework=framework,
        file=str(file),
    )


def place_words(place: Place) -> str:
    """A knob's place in one line: `--bs {}`, or `bf16: --bf16, fp32: nothing`."""
    if isinstance(place, str):
        return place
    return ", ".join(f"{value}: {words or NOTHING}" for value, words in place.items())


def flag_names(place: Place) -> set[str]:
    """The flags in a knob's words."""
    texts = [place] if isinstance(place, str) else place.values()
    return {word.partition("=")[0] for text in texts for word in text.split()}


def split_words(text: str, key: str) -> list[str]:
    """The words of a text as a shell splits them. Raises UserError with this key for an open quote."""
    try:
        return shlex.split(text)
    except ValueError:
        raise UserError(f"a quote is open in {text!r}", key=key) from None


def words_of(name: str, place: Place, value: KnobValue) -> list[str]:
    """The words that give a knob this value. Raises UserError for one that the table of words lacks."""
    shown = knob(name).show(value)
    if isinstance(place, str):
        return [word.replace("{}", shown) for word in split_words(place, name)]
    if shown not in place:
        raise UserError(f"{name}={shown} has no words in [script.knobs]", key=name, allowed=place)
    return split_words(place[shown], name)


def _flags(words: list[str]) -> list[list[str]]:
    """The words cut before each flag."""
    found: list[list[str]] = []
    for word in words:
        if not found or FLAG.match(word):
            found.append([])
        found[-1].append(word)
    return found


def _with_flag(words: list[str], flag: list[str]) -> list[str]:
    """`words` with the flag: in place of the same one, else at the end."""
    name, equals, _ = flag[0].partition("=")
    place = _place_of(words, name)
    if place is None:
        return [*words, *flag]
    if words[place] != name and not equals and len(flag) == 2:
        flag = [f"{name}={flag[1]}"]
    takes = 1 if equals else len(flag) - 1
    return [*words[:place], *flag, *words[_end_of(words, place, takes) :]]


def _without_flag(words: list[str], flag: list[str]) -> list[str]:
    """`words` without the flag and as many values as it takes."""
    place = _place_of(words, _name(flag))
    return words if place is None else [*words[:place], *words[_end_of(words, place, len(flag) - 1) :]]


def _name(flag: list[str]) -> str:
    return flag[0].partition("=")[0]


def _place_of(words: list[str], name: str) -> int | None:
    """The place of a flag behind the script: a launcher before it may have one of the same name."""
    script = next((n for n, word in enumerate(words) if word == "-m" or word.endswith(".py")), 0)
    found = (n for n, word in enumerate(words) if n >= script and (word == name or word.startswith(f"{name}=")))
    return next(found, None)


def _end_of(words: list[str], place: int, values: int) -> int:
    """The place behind a flag and at most so many values of its own."""
    end = place + 1
    while "=" not in words[place] and end < len(words) and end - place <= values and not FLAG.match(words[end]):
        end += 1
    return end


@dataclass(frozen=True)
class _Reader:
    file: Path
    text: str

    def error_at(self, message: str, at: tuple[str, ...], **more: Any) -> UserError:
        line = line_of(self.text, at)
        where = f"{self.file}:{line}" if line else str(self.file)
        return UserError(message, key=".".join(at), where=where, **more)

    def known(self, table: dict[str, Any], allowed: tuple[str, ...], at: tuple[str, ...]) -> None:
        for key in table:
            if key not in allowed:
                near = nearest(key, allowed)
                raise self.error_at(f"unknown key {key!r}", (*at, key), allowed=allowed, nearest=near)

    def table(self, raw: dict[str, Any], key: str, at: tuple[str, ...]) -> dict[str, Any]:
        value = raw.get(key, {})
        if not isinstance(value, dict):
            raise self.error_at(f"{key} must be a table, not {value!r}", (*at, key))
        return value

    def command(self, script: dict[str, Any]) -> list[str]:
        words = script.get("command", [])
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise self.error_at("command must be a list of words", ("script", "command"))
        return words

    def knob(self, name: str, at: tuple[str, ...]) -> None:
        try:
            knob(name)
        except UserError as error:
            raise self.error_at(error.message, at, allowed=error.allowed, nearest=error.nearest) from None

    def place(self, name: str, place: Place, at: tuple[str, ...]) -> None:
        try:
            for value, words in place.items() if isinstance(place, dict) else ((None, place),):
                split_words(words, name)
                if value is not None:
                    knob(name).read(value)
        except UserError as error:
            raise self.error_at(error.message, at, allowed=error.allowed, nearest=error.nearest) from None

    def value(self, name: str, value: object) -> KnobValue:
        try:
            return knob(name).read(value)
        except UserError as error:
            at = ("knobs", name)
            raise self.error_at(error.message, at, allowed=error.allowed, nearest=error.nearest) from None

    def words(self, raw: dict[str, Any], key: str, at: tuple[str, ...]) -> str:
        value = raw.get(key, "")
        if not isinstance(value, str):
            raise self.error_at(f"{key} must be text, not {value!r}", (*at, key))
        return value

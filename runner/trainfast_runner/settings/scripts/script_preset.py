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

import os
import re
import shlex
from pathlib import Path
from typing import Any

import msgspec

from trainfast_runner.errors import UserError
from trainfast_runner.records.discovered import FRAMEWORKS
from trainfast_runner.records.script_in_command import script_index
from trainfast_runner.settings import presets
from trainfast_runner.settings.knob_type import KnobValues
from trainfast_runner.settings.knob_values import KnobValue
from trainfast_runner.settings.knobs import knob
from trainfast_runner.settings.toml_source import TomlSource, read_toml

TOP_KEYS = ("schema", "title", "script", "knobs")
SCRIPT_KEYS = ("command", "cwd", "framework", "knobs")
FLAG = re.compile(r"-{1,2}[A-Za-z]")
"""The beginning of a flag; `-1` is a number."""

NOTHING = "nothing"
"""The word for no words where flag words are shown or typed."""

FlagWords = str | dict[str, str]
"""Words of the command with {} for the value, or the words by value."""


class ScriptPreset(msgspec.Struct, frozen=True):
    """A script's command, the words in it that set each knob, and the knobs to set."""

    command: tuple[str, ...] = ()
    flag_words: dict[str, FlagWords] = msgspec.field(default_factory=dict)
    knobs: KnobValues = msgspec.field(default_factory=dict)
    name: str = ""
    """The preset's name; empty for a command as typed."""
    title: str = ""
    cwd: str = ""
    """The folder in which the command starts; empty for the present one."""
    framework: str = ""
    """One of `FRAMEWORKS`; empty if it is unknown."""
    file: str = ""
    """The preset's file; empty for a command as typed."""

    def applied(self, command: list[str], knobs: KnobValues) -> list[str]:
        """Return `command` with the flags of these knobs; a flag that stands there gets the value. Raises UserError."""
        for name, value in knobs.items():
            if name not in self.flag_words:
                continue
            flag_words = self.flag_words[name]
            flags = _flag_groups(words_of(name, flag_words, value))
            own_names = {_flag_name(flag) for flag in flags}
            texts = flag_words.values() if isinstance(flag_words, dict) else ()
            # The flags of another value would contradict these.
            groups = [group for text in texts for group in _flag_groups(split_words(text, name))]
            for other in groups:
                if _flag_name(other) not in own_names:
                    command = _without_flag(command, other)
            for flag in flags:
                command = _with_flag(command, flag)
        return command


def path_of(reference: str) -> Path | None:
    """The file of a preset that has `[script]`, by its name or path; None for any other, also an unreadable one."""
    if reference.endswith(".toml"):
        path: Path | None = Path(os.path.expanduser(reference))
    else:
        path = presets.preset_files().get(reference)
    if path is None:
        return None
    try:
        return path if "script" in read_toml(path)[1] else None
    except UserError:
        return None


def load(path: str | Path) -> ScriptPreset:
    """Read a preset file that has `[script]`. Raises UserError naming file, line and key."""
    file = Path(os.path.expanduser(path))
    source, raw = read_toml(file)
    source.refuse_unknown_keys(raw, TOP_KEYS)
    if not presets.is_schema(raw.get("schema")):
        raise source.error_at(("schema",), f"schema must be {presets.SCHEMA}")
    script = source.table(raw, "script")
    source.refuse_unknown_keys(script, SCRIPT_KEYS, ("script",))
    by_knob = source.table(script, "knobs", ("script",))
    for name, flag_words in by_knob.items():
        try:
            _check_flag_words(name, flag_words)
        except UserError as error:
            raise source.located(error, "script", "knobs", name) from None
    cwd, framework = (source.text(script, key, ("script",)) for key in ("cwd", "framework"))
    if framework and framework not in FRAMEWORKS:
        raise source.error_at(("script", "framework"), f"there is no framework {framework!r}", allowed=FRAMEWORKS)
    return ScriptPreset(
        _command_of(script, source),
        by_knob,
        source.knobs(source.table(raw, "knobs"), ("knobs",)),
        name=file.stem,
        title=source.text(raw, "title"),
        cwd=os.path.realpath(file.parent / os.path.expanduser(cwd)) if cwd else "",
        framework=framework,
        file=str(file),
    )


def flag_words_text(flag_words: FlagWords) -> str:
    """The words in one line: `--bs {}`, or `bf16: --bf16, fp32: nothing`."""
    if isinstance(flag_words, str):
        return flag_words
    return ", ".join(f"{value}: {words or NOTHING}" for value, words in flag_words.items())


def flag_tokens(flag_words: FlagWords) -> set[str]:
    """Every word up to its `=`: the flags, and their values."""
    texts = [flag_words] if isinstance(flag_words, str) else flag_words.values()
    return {word.partition("=")[0] for text in texts for word in text.split()}


def split_words(text: str, key: str) -> list[str]:
    """The words of a text as a shell splits them. Raises UserError with this key for an open quote."""
    try:
        return shlex.split(text)
    except ValueError:
        raise UserError(f"a quote is open in {text!r}", key=key) from None


def words_of(name: str, flag_words: FlagWords, value: KnobValue) -> list[str]:
    """The words that give a knob this value. Raises UserError for one that the table of words lacks."""
    shown = knob(name).text_of(value)
    if isinstance(flag_words, str):
        return [word.replace("{}", shown) for word in split_words(flag_words, name)]
    if shown not in flag_words:
        raise UserError(f"{name}={shown} has no words in [script.knobs]", key=name, allowed=flag_words)
    return split_words(flag_words[shown], name)


def _flag_groups(words: list[str]) -> list[list[str]]:
    """The words cut before each flag and each further NAME=VALUE."""
    groups: list[list[str]] = []
    for word in words:
        if not groups or FLAG.match(word) or ("=" in groups[-1][0] and "=" in word):
            groups.append([])
        groups[-1].append(word)
    return groups


def _with_flag(command: list[str], flag: list[str]) -> list[str]:
    """`command` with the flag: in place of the same one, else at the end."""
    name, equals, _ = flag[0].partition("=")
    index = _index_of_flag(command, name)
    if index is None:
        return [*command, *flag]
    if command[index] != name and not equals and len(flag) == 2:
        flag = [f"{name}={flag[1]}"]
    takes = 1 if equals else len(flag) - 1
    return [*command[:index], *flag, *command[_end_of_flag(command, index, takes) :]]


def _without_flag(command: list[str], flag: list[str]) -> list[str]:
    """`command` without the flag, however often it stands there, and as many values as it takes."""
    while (index := _index_of_flag(command, _flag_name(flag))) is not None:
        command = [*command[:index], *command[_end_of_flag(command, index, len(flag) - 1) :]]
    return command


def _flag_name(flag: list[str]) -> str:
    return flag[0].partition("=")[0]


def _index_of_flag(command: list[str], name: str) -> int | None:
    """Index of the last such flag after the script, which argparse takes; a launcher before it may have one too."""
    script = script_index(command) or 0
    indexes = (n for n, word in enumerate(command) if n >= script and (word == name or word.startswith(f"{name}=")))
    return max(indexes, default=None)


def _end_of_flag(command: list[str], index: int, values: int) -> int:
    """Index after a flag and at most `values` values of its own."""
    end = index + 1
    while "=" not in command[index] and end < len(command) and end - index <= values and not FLAG.match(command[end]):
        end += 1
    return end


def _check_flag_words(name: str, flag_words: object) -> None:
    """Raise UserError unless these are words with {} or words by value, for a knob and values that there are."""
    entry = knob(name)
    by_value: dict[str, Any] = flag_words if isinstance(flag_words, dict) else {}
    texts: list[Any] = list(by_value.values()) if isinstance(flag_words, dict) else [flag_words]
    if not all(isinstance(text, str) for text in texts) or (isinstance(flag_words, str) and "{}" not in flag_words):
        raise UserError(f"{name} needs words with {{}} for its value, or a table of words by value")
    for words in texts:
        split_words(words, name)
    for value in by_value:
        entry.read(value)


def _command_of(script: dict[str, Any], source: TomlSource) -> tuple[str, ...]:
    """Return the words of the command; empty if the preset has none. Raises UserError."""
    command = script.get("command", [])
    if not isinstance(command, list) or not all(isinstance(word, str) and "\0" not in word for word in command):
        raise source.error_at(("script", "command"), "command must be a list of words")
    return tuple(command)

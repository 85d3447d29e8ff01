"""Settings put into the command of a shell file that starts a script, all other text kept."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from trainfast_runner.errors import UserError
from trainfast_runner.export.call_fields import CallFields

LOGICAL_LINE = re.compile(r"(?:\\.|[^\n\\])+", re.S)
"""A line with those that a backslash at its end joins to it."""
WORD = re.compile(r"""\d+[<>]|(?:'[^']*'|"(?:\\.|[^"\\])*"|\$\([^)]*\)|\\[^\n]|[^\s\\'";&|<>])+|[;&|<>]+""", re.S)
"""A word, or an operator between words."""
ENDS = re.compile(r"\d*[<>]|[;&|#]")
"""The start of an operator or comment. The command's own words end before it."""


@dataclass(frozen=True)
class Word:
    """A word of a command as typed, and its place in the file."""

    text: str
    begin: int
    end: int

    @property
    def value(self) -> str:
        """The word without its quotes."""
        try:
            return "".join(shlex.split(self.text))
        except ValueError:
            return self.text


def script_commands(text: str) -> list[list[Word]]:
    """The commands of a shell file that name a Python script or a module, as words; those in comments are none."""
    found = []
    for line in LOGICAL_LINE.finditer(text):
        if line[0].lstrip().startswith("#"):
            continue
        words = [Word(one[0], line.start() + one.start(), line.start() + one.end()) for one in WORD.finditer(line[0])]
        found += [command for command in _commands(words) if script_place(command) is not None]
    return found


def _commands(words: list[Word]) -> Iterator[list[Word]]:
    """The words of a line up to its comment, cut at each operator."""
    command: list[Word] = []
    for word in words:
        if not ENDS.match(word.text):
            command.append(word)
            continue
        yield command
        command = []
        if word.text.startswith("#"):
            return
    yield command


def script_place(words: list[Word]) -> int | None:
    """The index of the script, or of the module behind `-m`; None for a command without."""
    for place, word in enumerate(words):
        if word.value.endswith(".py"):
            return place
    modules = [place for place, word in enumerate(words) if word.text == "-m" and place + 1 < len(words)]
    return modules[-1] + 1 if modules else None


def edited(text: str, file: str, wanted: CallFields) -> tuple[str, list[str]]:
    """The file with the settings as flags of its command, and sentences about values that the shell fills in.

    Raises UserError unless one command starts a script with flags of transformers' TrainingArguments.
    """
    commands = script_commands(text)
    if len(commands) != 1:
        lines = ", ".join(str(text.count("\n", 0, words[0].begin) + 1) for words in commands)
        raise UserError(
            f"{file} starts scripts in lines {lines}: which one trains is open"
            if commands
            else f"{file} starts no script",
            key="--onto",
            advice="a file with one command that names a .py file",
        )
    [words] = commands
    script = script_place(words) or 0
    flags = flags_of(words[script + 1 :])
    if not any(wanted.name_in(field, flags) in flags for field in wanted.fields) and "output_dir" not in flags:
        raise UserError(
            f"{file} gives its script none of the flags of transformers' TrainingArguments",
            key="--onto",
            advice="the script itself: --onto SCRIPT.py",
        )
    edits, added, notes = _edits(flags, wanted, file)
    if added:
        between = " \\\n  " if "\n" in text[words[0].begin : words[-1].end] else " "
        end = words[script].end
        edits.append((end, end, "".join(f"{between}{flag}" for flag in added)))
    for begin, end, new in sorted(edits, reverse=True):
        text = text[:begin] + new + text[end:]
    return text, notes


def _edits(
    flags: dict[str, tuple[Word, Word | None]], wanted: CallFields, file: str
) -> tuple[list[tuple[int, int, str]], list[str], list[str]]:
    """Replacements in the text, flags to add, and sentences."""
    edits: list[tuple[int, int, str]] = []
    added: list[str] = []
    notes: list[str] = []
    for field, value in wanted.fields.items():
        name = wanted.name_in(field, flags)
        new = shlex.quote(str(value))
        if name not in flags:
            added += [f"--{name} {new}"] if wanted.is_added(field) else []
            continue
        flag, given = flags[name]
        if given is not None and "$" in given.text:
            notes.append(f"{file}: --{name} is {given.text}: make it {new}")
        elif value is None:
            edits.append((flag.begin, (given or flag).end, ""))
        elif given is None:
            edits += [] if value is True else [(flag.end, flag.end, f" {new}")]
        elif given.value.lower() != str(value).lower() and _number(given.value) != value:
            edits.append((given.begin, given.end, new))
    return edits, added, notes


def flags_of(words: list[Word]) -> dict[str, tuple[Word, Word | None]]:
    """The flags by name with underscores: the word of each, and of its value, None for a flag alone."""
    found: dict[str, tuple[Word, Word | None]] = {}
    for place, word in enumerate(words):
        if not word.text.startswith("--") or word.text == "--":
            continue
        name, equals, value = word.text[2:].partition("=")
        after = words[place + 1] if place + 1 < len(words) else None
        if equals:
            given: Word | None = Word(value, word.end - len(value), word.end)
        else:
            given = after if after is not None and not after.text.startswith("--") else None
        found[name.replace("-", "_")] = (word, given)
    return found


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None

"""Commands of a shell file as words with their places, and the flags among them. Nothing is executed."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from trainfast_runner.records.script_in_command import script_index

LOGICAL_LINE = re.compile(r"(?:\\.|[^\n\\])+", re.S)
"""A line with the lines that a backslash at its end joins."""
REDIRECTION = r"&>>?|\d*(?:<<[<-]?|<>|<&|>&|>\||>>|[<>](?!\())"
"""An operator whose next word is a file, and no argument of the command (bash manual, 3.6)."""
WORD = re.compile(
    REDIRECTION + r"""|(?:'[^']*'|"(?:\\.|[^"\\])*"|[$<>]\([^)]*\)|\\[^\n]|[^\s\\'";&|<>])+|[;&|<>]+""", re.S
)
"""A word, or an operator between words."""
REDIRECTION_WORD = re.compile(REDIRECTION)
COMMAND_END = re.compile("[;&|#]")
"""The start of an operator or comment. The command's own words end before it."""


@dataclass(frozen=True)
class Word:
    """A word of a command as typed, with its first character in the file and the one after its last."""

    text: str
    begin: int
    end: int

    @property
    def value(self) -> str:
        """The word without its quotes, those in `$(...)` too."""
        try:
            return " ".join(shlex.split(self.text))
        except ValueError:
            return self.text


def script_commands(text: str) -> list[list[Word]]:
    """The commands of a shell file that name a Python script or a module, as words; those in comments are none."""
    commands = []
    for line in LOGICAL_LINE.finditer(text):
        if line[0].lstrip().startswith("#"):
            continue
        words = [
            Word(match[0], line.start() + match.start(), line.start() + match.end()) for match in WORD.finditer(line[0])
        ]
        commands += [command for command in _commands(words) if index_of_script(command) is not None]
    return commands


def index_of_script(words: list[Word]) -> int | None:
    """Return the index of the script's file or module in the command; None if it has neither."""
    return script_index([word.value for word in words])


def _commands(words: list[Word]) -> Iterator[list[Word]]:
    """The words of a line up to its comment, cut at each operator; redirections are left out."""
    command: list[Word] = []
    is_file = False
    for word in words:
        if is_file or REDIRECTION_WORD.match(word.text):
            is_file = not is_file
            continue
        if not COMMAND_END.match(word.text):
            command.append(word)
            continue
        yield command
        command = []
        if word.text.startswith("#"):
            return
    yield command


def flags_of(words: list[Word]) -> dict[str, tuple[Word, Word | None]]:
    """The flags by name with underscores: the word of each, and of its value, None for a flag alone.

    The value in `--flag=value` has the place of the whole word, since quotes may stand around both.
    """
    flags: dict[str, tuple[Word, Word | None]] = {}
    for index, word in enumerate(words):
        if not word.value.startswith("--") or word.value == "--":
            continue
        name, equals, value = word.value[2:].partition("=")
        after = words[index + 1] if index + 1 < len(words) else None
        if equals:
            value_word: Word | None = Word(shlex.quote(value), word.begin, word.end)
        else:
            value_word = after if after is not None and not after.value.startswith("--") else None
        flags[name.replace("-", "_")] = (word, value_word)
    return flags


def literal(text: str) -> Any:
    """A flag's value as a number or a boolean if it is one, else as text."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        value = ast.literal_eval(text)
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        # The last two are for expressions too deep for the parser.
        return text
    return value if isinstance(value, int | float) else text

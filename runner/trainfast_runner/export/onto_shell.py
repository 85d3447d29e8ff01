"""Settings put into the command of a shell file that starts a script, all other text kept."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from difflib import SequenceMatcher

from trainfast_runner.errors import UserError
from trainfast_runner.export.call_fields import CallFields
from trainfast_runner.export.shell_words import Word, flags_of, index_of_script, script_commands

BLANKS_AT_END = re.compile(r"(?:[ \t]|\\\n)*\Z")
"""Blanks and line continuations before a word, which go where the word is removed."""
ShellEdit = tuple[int, int, str]
"""Characters from, characters to, and the text that replaces them."""


def edit_command(
    text: str, file: str, target: CallFields, applied: Callable[[list[str]], list[str]] | None = None
) -> tuple[str, list[str]]:
    """The file with the settings in its command, and notes for the user on words that the shell fills in.

    `target` has flags of transformers' TrainingArguments, `applied` puts settings into flags of the script's own.
    Raises UserError unless one command starts a script, with flags of TrainingArguments if there is no `applied`.
    """
    words = _only_command(text, file)
    script = index_of_script(words) or 0
    flags = flags_of(words[script + 1 :])
    edits, notes = _word_edits(words, applied, file) if applied is not None else ([], [])
    if any(target.name_in(field, flags) in flags for field in target.fields) or "output_dir" in flags:
        flag_edits, new_flags, flag_notes = _flag_edits(flags, target, file)
        edits, notes = [*edits, *flag_edits], [*notes, *flag_notes]
        if new_flags:
            between = " \\\n  " if "\n" in text[words[0].begin : words[-1].end] else " "
            end = words[script].end
            edits.append((end, end, "".join(f"{between}{flag}" for flag in new_flags)))
    elif applied is None:
        raise UserError(
            f"{file} gives its script none of the flags of transformers' TrainingArguments",
            key="--onto",
            advice="the script itself: --onto SCRIPT.py",
        )
    elif target.fields:
        notes.append(f"{file}: its command has no flag for {', '.join(target.fields)}")
    for begin, end, new in sorted(edits, reverse=True):
        before = text[:begin] if new else BLANKS_AT_END.sub("", text[:begin])
        text = before + new + text[end:]
    return text, notes


def _only_command(text: str, file: str) -> list[Word]:
    """The words of the only command that starts a script. Raises UserError for none and for several."""
    commands = script_commands(text)
    if len(commands) == 1:
        return commands[0]
    lines = ", ".join(str(text.count("\n", 0, words[0].begin) + 1) for words in commands)
    raise UserError(
        f"{file} starts scripts in lines {lines}: more than one" if commands else f"{file} starts no script",
        key="--onto",
        advice="a file with one command that names a .py file",
    )


def _word_edits(
    words: list[Word], applied: Callable[[list[str]], list[str]], file: str
) -> tuple[list[ShellEdit], list[str]]:
    """The replacements that `applied` makes of the command's words, and notes on those with variables."""
    before = [word.value for word in words]
    after = applied(before)
    typed = {word.value: word.text for word in words}
    edits: list[ShellEdit] = []
    notes: list[str] = []
    for kind, begin, end, first, last in SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        old = words[begin:end]
        new = [typed.get(word) or shlex.quote(word) for word in after[first:last]]
        words_with_variables = [word.text for word in old if "$" in word.text]
        if kind == "equal":
            continue
        if words_with_variables:
            notes.append(f"{file}: {' '.join(words_with_variables)} has to be {' '.join(new)}")
        elif old:
            edits.append((old[0].begin, old[0].end, " ".join(new)))
            edits += [(word.begin, word.end, "") for word in old[1:]]
        else:
            end_before = words[begin - 1].end
            edits.append((end_before, end_before, "".join(f" {word}" for word in new)))
    return edits, notes


def _flag_edits(
    flags: dict[str, tuple[Word, Word | None]], target: CallFields, file: str
) -> tuple[list[ShellEdit], list[str], list[str]]:
    """Replacements in the text, flags to add, and notes for the user."""
    edits: list[ShellEdit] = []
    new_flags: list[str] = []
    notes: list[str] = []
    for field, value in target.fields.items():
        name = target.name_in(field, flags)
        new = shlex.quote(str(value))
        if name not in flags:
            new_flags += [f"--{name} {new}"] if target.is_added(field) else []
            continue
        flag, value_word = flags[name]
        if value_word is not None and "$" in value_word.text:
            notes.append(f"{file}: --{name} is {value_word.value}: make it {new}")
        elif value is None:
            gone = [flag] if value_word is None or value_word.begin == flag.begin else [flag, value_word]
            edits += [(word.begin, word.end, "") for word in gone]
        elif value_word is None:
            edits += [] if value is True else [(flag.end, flag.end, f" {new}")]
        elif value_word.value.lower() != str(value).lower() and _number(value_word.value) != value:
            joined_flag = flag.value.partition("=")[0] + "=" if value_word.begin == flag.begin else ""
            edits.append((value_word.begin, value_word.end, joined_flag + new))
    return edits, new_flags, notes


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None

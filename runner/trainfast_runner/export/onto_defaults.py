"""Settings put into the defaults of a script's own flags, where it declares them."""

from __future__ import annotations

import ast
from collections.abc import Mapping

from trainfast_runner.export.call_fields import CallFields
from trainfast_runner.export.onto_python import Edit, call_edits, with_edits
from trainfast_runner.export.python_calls import ByteOffsets, calls_of, parsed
from trainfast_runner.export.shell_words import literal
from trainfast_runner.settings.knob_type import KnobValues
from trainfast_runner.settings.scripts.script_preset import FlagWords, words_of

DECLARING_FUNCTIONS = ("add_argument", "option")
"""Functions that declare a flag: argparse's method and click's decorator."""


def flags_by_knob(flag_words: Mapping[str, FlagWords], knobs: KnobValues) -> dict[str, tuple[str, object]]:
    """The script's flag of each knob and its value. A knob that takes no flag with one value is left out."""
    flags: dict[str, tuple[str, object]] = {}
    for name, value in knobs.items():
        words = words_of(name, flag_words[name], value) if name in flag_words else []
        if len(words) == 1 and "=" in words[0]:
            words = words[0].split("=", 1)
        if len(words) == 2 and words[0].startswith("-"):
            flags[name] = words[0], literal(words[1])
    return flags


def edit_defaults(source: str, file: str, values: Mapping[str, object]) -> tuple[str, list[str], set[str]]:
    """The script with `values`, by flag, as defaults; notes for the user; and the flags that it declares.

    Raises UserError for a script that is not Python.
    """
    offsets = ByteOffsets(source)
    edits: list[Edit] = []
    notes: list[str] = []
    declared_flags: set[str] = set()
    for call in calls_of(parsed(source, file), DECLARING_FUNCTIONS):
        names = [argument.value for argument in call.args if isinstance(argument, ast.Constant)]
        for flag in (flag for flag in values if flag in names):
            declared_flags.add(flag)
            if _is_required(call):
                notes.append(f"{file}:{call.lineno}: {flag} is required: give it {values[flag]!r}")
                continue
            flag_edits, flag_notes = call_edits(
                call, CallFields(DECLARING_FUNCTIONS, {"default": values[flag]}), offsets, file
            )
            edits += flag_edits
            notes += flag_notes
            if flag_edits:
                notes.append(f"{file}:{call.lineno}: a command that names {flag} wins over its default")
    return with_edits(source, edits), notes, declared_flags


def _is_required(call: ast.Call) -> bool:
    """True if the flag has to be given, and its default is of no use."""
    return any(keyword.arg == "required" and getattr(keyword.value, "value", None) is True for keyword in call.keywords)

"""The mapping of knobs to a script's flags as a person types it: `KNOB=FLAG`, a flag, or words by value."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest

from trainfast_runner.errors import UserError, nearest
from trainfast_runner.records.discovered import Flag
from trainfast_runner.settings.knob_values import KnobValue
from trainfast_runner.settings.knobs import knob
from trainfast_runner.settings.scripts.script_mapping import (
    ON_VALUES,
    FlagMapping,
    flag_words_of,
    on_and_off,
    present_value,
    propose,
    value_or_none,
)
from trainfast_runner.settings.scripts.script_preset import NOTHING, split_words

WORDS_BY_VALUE = re.compile(r"[\w.-]+: ")
"""The beginning of words by value, as `flag_words_text` shows them."""


def flag_mappings(flags: Sequence[Flag], changes: Iterable[str]) -> list[FlagMapping]:
    """The proposed mappings with every `KNOB=FLAG` that a person gave; `KNOB=` takes a knob out. Raises UserError."""
    by_knob = {mapping.knob: mapping for mapping in propose(flags)}
    for change in changes:
        name, equals, words = change.partition("=")
        if not equals:
            raise UserError(f"--map takes KNOB=FLAG, not {change!r}", key="--map")
        name = knob(name.strip()).name
        if words.strip():
            by_knob[name] = mapping_typed(name, words, flags, "given by --map", example=f"--map '{name}={{}}'")
        else:
            by_knob.pop(name, None)
    return list(by_knob.values())


def mapping_typed(name: str, typed: str, flags: Sequence[Flag], reason: str, example: str = "'{}'") -> FlagMapping:
    """The flag of a knob that a person typed: a flag, more words with {} for the value, or words by value as
    `flag_words_text` shows them.

    Raises UserError naming the nearest flag that the script has; `example` stands around words that would do.
    """
    typed = typed.strip()
    if WORDS_BY_VALUE.match(typed):
        table = _words_by_value(name, typed, flags)
        return FlagMapping(name, table, _value_in_force(name, table, flags), reason)
    parts = split_words(typed, name)
    word = parts[0].partition("=")[0] if parts else ""
    flag = _flag_of(word, flags)
    if parts == [word] and flag.type in ("switch", "bool") and name in ON_VALUES:
        return FlagMapping(name, on_and_off(name, flag, word), present_value(name, flag), reason)
    if parts == [word] and "switch" in flag.type:
        raise UserError(f"{word} takes no value, which {name} needs", key=word)
    if parts != [word] and "{}" not in typed:
        advice = example.replace("{}", f"{word} {{}}")
        raise UserError(f"{typed} has no {{}} for the value", key=name, advice=advice)
    flag_words = flag_words_of(flag, word) if parts == [word] else typed
    return FlagMapping(name, flag_words, value_or_none(name, flag.value), reason)


def _flag_of(word: str, flags: Sequence[Flag]) -> Flag:
    """The flag of this name. Raises UserError naming the nearest that the script has."""
    names = {name: flag for flag in flags for name in flag.names}
    if word in names:
        return names[word]
    similar = nearest(word, names)
    message = f"the script has no flag {word}" if names else "the script has no flags"
    raise UserError(message, key=word, nearest=similar, allowed=None if similar or not names else sorted(names))


def _words_by_value(name: str, typed: str, flags: Sequence[Flag]) -> dict[str, str]:
    """The words by value of `bf16: --half, fp32: nothing`. Raises UserError for a value or a flag that there is not."""
    words_by_value: dict[str, str] = {}
    for part in typed.split(", "):
        value, colon, words = part.partition(":")
        if not colon:
            raise UserError(
                f"{part!r} in {typed!r} is not VALUE: FLAG", key=name, advice=f"'{part.strip()}: {NOTHING}'"
            )
        words = "" if words.strip() == NOTHING else words.strip()
        for first in split_words(words, name)[:1]:
            _flag_of(first.partition("=")[0], flags)
        words_by_value[knob(name).text_of(knob(name).read(value.strip()))] = words
    return words_by_value


def _value_in_force(name: str, table: Mapping[str, str], flags: Sequence[Flag]) -> KnobValue:
    """The value whose words the command has, else the one without words; None if there is neither."""
    in_force = [value for value, words in table.items() if _are_in_force(split_words(words, name), flags)]
    values_without_words = [value for value, words in table.items() if not words]
    return next((knob(name).read(value) for value in (*in_force, *values_without_words)), None)


def _are_in_force(words: Sequence[str], flags: Sequence[Flag]) -> bool:
    """True if the command gives every flag in these words its value there."""
    by_name = {name: flag for flag in flags for name in flag.names}
    in_force: list[bool] = []
    for word, next_word in zip_longest(words, words[1:], fillvalue=""):
        first, equals, value = word.partition("=")
        if (flag := by_name.get(first)) is None:
            continue
        value = value if equals or next_word.partition("=")[0] in by_name else next_word
        typed_value = value or str("off" not in flag.type and first != flag.off)
        in_force.append(str(flag.value).lower() == typed_value.lower())
    return bool(in_force) and all(in_force)

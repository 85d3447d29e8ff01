"""A preset's file: its tables and texts, read with errors that name file, line and key."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from trainfast_runner.errors import UserError, nearest
from trainfast_runner.records.regular_files import read_regular
from trainfast_runner.settings.knob_type import KnobValues
from trainfast_runner.settings.knobs import knob

KeyPath = tuple[str | int, ...]
"""The keys that lead to a value, such as ("variants", 1, "knobs", "batch_size")."""
HEADER_LINE = re.compile(r"^\s*\[\[?\s*([^\[\]]+?)\s*\]\]?\s*(?:#.*)?$")
KEY_LINE = re.compile(r"^\s*(?:\"([^\"]+)\"|'([^']+)'|([A-Za-z0-9_.\-]+))\s*=")


class TomlSource(msgspec.Struct, frozen=True):
    """The text of a preset's file. Every method but `error_at` and `located` raises UserError for a bad value."""

    path: Path
    content: str

    def error_at(
        self,
        at: KeyPath,
        message: str,
        allowed: Iterable[str] | None = None,
        nearest: str | None = None,
        advice: str | None = None,
    ) -> UserError:
        """Return the error about the value at this key."""
        line = line_of(self.content, at)
        where = f"{self.path}:{line}" if line else str(self.path)
        key = ".".join(map(str, at))
        return UserError(message, key=key, allowed=allowed, nearest=nearest, advice=advice, where=where)

    def located(self, error: UserError, *at: str | int) -> UserError:
        """Return the error about the value at this key, with its file and line."""
        return self.error_at(at, error.message, error.allowed, error.nearest, error.advice)

    def refuse_unknown_keys(self, table: Mapping[str, Any], allowed: tuple[str, ...], at: KeyPath = ()) -> None:
        """Refuse a key that is not allowed, naming the nearest."""
        for key in table:
            if key not in allowed:
                raise self.error_at((*at, key), f"unknown key {key!r}", allowed=allowed, nearest=nearest(key, allowed))

    def table(self, raw: Mapping[str, Any], key: str, at: KeyPath = ()) -> dict[str, Any]:
        """Return a copy of the table at the key; empty without it."""
        value = raw.get(key, {})
        if not isinstance(value, dict):
            raise self.error_at((*at, key), f"{key} must be a table, not {value!r}")
        return dict(value)

    def text(self, raw: Mapping[str, Any], key: str, at: KeyPath = ()) -> str:
        """Return the text at the key; empty without it."""
        value = raw.get(key, "")
        if not isinstance(value, str) or "\0" in value:
            raise self.error_at((*at, key), f"{key} must be text, not {value!r}")
        return value

    def knobs(self, table: Mapping[str, Any], at: KeyPath) -> KnobValues:
        """Return the typed values of a table of knobs."""
        values: KnobValues = {}
        for name, value in table.items():
            try:
                values[name] = knob(name).read(value)
            except UserError as error:
                raise self.located(error, *at, name) from None
        return values


def read_toml(path: Path) -> tuple[TomlSource, dict[str, Any]]:
    """Return the text of a preset's file and its table. Raises UserError for a file that is not TOML in UTF-8."""
    try:
        # Editors of Windows begin a file with a byte-order mark.
        text = read_regular(path).decode("utf-8-sig").replace("\r\n", "\n")
    except FileNotFoundError:
        close = nearest(path.name, [file.name for file in path.parent.glob("*.toml")])
        found = None if close is None else str(path.with_name(close))
        raise UserError(f"there is no preset file {path}", key=str(path), nearest=found) from None
    except IsADirectoryError:
        raise UserError(f"{path} is a directory, not a preset file", key=str(path)) from None
    except OSError as error:
        raise UserError(f"cannot read preset {path}: {error.strerror}", key=str(path)) from None
    except UnicodeDecodeError as error:
        raise UserError(f"cannot read preset {path}: {error}; save it as UTF-8", key=str(path)) from None
    try:
        return TomlSource(path, text), tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        # Not only TOMLDecodeError: a whole number of more digits than Python reads, and too many levels.
        raise UserError(f"{path}: not valid TOML: {error}", key=str(path)) from None


def line_of(text: str, path: Sequence[str | int]) -> int | None:
    """Return the line (from 1) of a key; None if it is not found.

    Walks table headers and keys; a key inside an inline table is given the line where that table starts
    unless it stands on a line of its own.
    """
    keys = [str(part) for part in path]
    deepest_match: tuple[int, int] | None = None
    table: list[str] = []
    counts: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        header = HEADER_LINE.match(line)
        if header:
            name = header[1].strip()
            table = [part.strip().strip("\"'") for part in name.split(".")]
            if line.lstrip().startswith("[["):
                counts[name] = counts.get(name, -1) + 1
                table.append(str(counts[name]))
            elif table and table[0] in counts:
                table = [table[0], str(counts[table[0]]), *table[1:]]
            line_keys = table
        else:
            key = KEY_LINE.match(line)
            if not key:
                continue
            line_keys = table + (key[3].split(".") if key[3] else [key[1] or key[2]])
        depth = len(line_keys)
        if line_keys == keys[:depth] and (deepest_match is None or depth > deepest_match[1]):
            deepest_match = (number, depth)
    return deepest_match[0] if deepest_match else None

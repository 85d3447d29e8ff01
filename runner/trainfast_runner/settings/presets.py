"""Presets: TOML recipes of an experiment, shipped ones and the user's own."""

from __future__ import annotations

import datetime
import math
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from trainfast_runner.errors import UserError, nearest
from trainfast_runner.records.home import config_directory
from trainfast_runner.records.json_lines import read_regular
from trainfast_runner.settings.knob_values import KnobValues
from trainfast_runner.settings.knobs import KNOBS_BY_NAME, knob
from trainfast_runner.worker.shared.words import DATA_KINDS, DATA_TEXTS, TRAINING_OBJECTIVES

SCHEMA = 1
PLAIN_PRESET = "tiny-llama"
"""The preset that trains on any machine, and the base of settings without one."""
TOP_KEYS = ("schema", "title", "extends", "model", "data", "knobs", "baseline", "variants")
MODEL_SOURCES = ("hub", "path", "family")
DATA_KEYS = ("kind", "objective", "texts", "paths", "tokenizer", "name", "split")
VARIANT_KEYS = ("id", "model", "data", "knobs", "published")


class Variant(msgspec.Struct, frozen=True):
    """One row of a table preset: knobs on top of the preset's own, and the figures published for it."""

    id: str
    knobs: KnobValues
    published: dict[str, Any] = msgspec.field(default_factory=dict)
    model: dict[str, Any] = msgspec.field(default_factory=dict)
    """Overrides of the preset's fields; a model that names its own source takes the place of the preset's."""
    data: dict[str, Any] = msgspec.field(default_factory=dict)
    """Overrides of the preset's fields."""


class Preset(msgspec.Struct, frozen=True):
    """A recipe as written, with everything it extends merged in."""

    name: str
    title: str
    model: dict[str, Any]
    data: dict[str, Any]
    knobs: KnobValues
    """Only the knobs that the recipe sets."""
    baseline: str | None
    variants: tuple[Variant, ...]
    files: tuple[Path, ...]
    """The files that the recipe was read from, its own first."""
    shipped: bool

    def variant(self, id: str) -> Variant:
        """The variant of that id. Raises UserError with the nearest."""
        for row in self.variants:
            if row.id == id:
                return row
        ids = [row.id for row in self.variants]
        raise UserError(f"preset {self.name} has no variant {id!r}", key=id, allowed=ids, nearest=nearest(id, ids))

    @property
    def baseline_variant(self) -> Variant | None:
        """The variant that others are compared with, the first unless `baseline` names one; None without variants."""
        if self.baseline is not None:
            return self.variant(self.baseline)
        return self.variants[0] if self.variants else None

    def model_of(self, variant: Variant | None) -> dict[str, Any]:
        """`[model]` of the preset, or of one of its variants."""
        return _merged_model(self.model, variant.model if variant else {})


def shipped_directory() -> Path:
    """The presets that came with the package: beside it in a wheel, at the top of a source checkout."""
    installed = Path(__file__).parents[1] / "shipped_presets"
    return installed if installed.is_dir() else Path(__file__).resolve().parents[3] / "presets"


def user_directory() -> Path:
    """`trainfast-tui/presets` in the XDG configuration directory."""
    return config_directory() / "presets"


def preset_files() -> dict[str, Path]:
    """Every preset by its name, with its file; a user's preset hides a shipped one of the same name."""
    files: dict[str, Path] = {}
    for directory in (shipped_directory(), user_directory()):
        if directory.is_dir():
            files.update({path.stem: path for path in sorted(directory.glob("*.toml"))})
    return files


def load(reference: str) -> tuple[Preset, Variant | None]:
    """The preset that is called `NAME`, `NAME/VARIANT_ID` or a path ending in `.toml` (`x.toml/VARIANT_ID` too).

    Raises UserError naming file, line, key and the nearest valid name.
    """
    head, separator, variant_id = reference.partition(".toml/")
    if separator or reference.endswith(".toml"):
        preset = _load_file(Path(os.path.expanduser(head + ".toml" if separator else reference)))
    else:
        name, separator, variant_id = reference.partition("/")
        preset = _load_file(_file_of(name, reference))
    return preset, preset.variant(variant_id) if separator else None


def _file_of(name: str, reference: str) -> Path:
    """Return the file of the preset of that name. Raises UserError for a `reference` to none, or to a path."""
    files = preset_files()
    if name in files:
        return files[name]
    if reference.startswith((".", "/", "~")):
        raise UserError(f"there is no preset {reference!r}", key=reference, advice="a path that ends in .toml")
    raise UserError(f"there is no preset {name!r}", key=name, allowed=files, nearest=nearest(name, files))


def read_preset_file(path: Path, keys: tuple[str, ...]) -> tuple[TomlSource, dict[str, Any]]:
    """Return a preset's file and its table. Raises UserError unless it is TOML of this schema with these keys."""
    source, raw = read_toml(path)
    if "script" in raw and "script" not in keys:
        takes = "trainfast-tui run, bench --vary and search take it"
        raise source.error_at(("script",), f"{path.stem} is the preset of a script: {takes}")
    source.refuse_unknown_keys(raw, keys)
    if "schema" not in raw:
        raise source.error_at(("schema",), f"schema is missing: add schema = {SCHEMA}")
    # `true` and 1.0 equal the number, but are other values of TOML.
    if type(raw["schema"]) is not int or raw["schema"] != SCHEMA:
        raise source.error_at(("schema",), f"schema must be {SCHEMA}", allowed=[str(SCHEMA)])
    return source, raw


def _load_file(path: Path, extended_by: tuple[Path, ...] = ()) -> Preset:
    """Read one file and all it extends. `extended_by` are the files that led here, to refuse a circle."""
    source, raw = read_preset_file(path, TOP_KEYS)
    preset = Preset(
        name=path.stem,
        title=source.text(raw, "title") or path.stem,
        model=_model(raw, source, (), needs_source="extends" not in raw),
        data=_data(raw, source, ()),
        knobs=source.knobs(source.table(raw, "knobs"), ("knobs",)),
        baseline=source.text(raw, "baseline") if "baseline" in raw else None,
        variants=_variants(raw, source),
        files=(path,),
        shipped=path.parent == shipped_directory(),
    )
    if "extends" in raw:
        parent = _parent(source.text(raw, "extends"), source, extended_by)
        preset = _merged(parent, preset, has_title="title" in raw)
    ids = [row.id for row in preset.variants]
    if preset.baseline is not None and preset.baseline not in ids:
        message, similar = f"baseline {preset.baseline!r} is not a variant", nearest(preset.baseline, ids)
        raise source.error_at(("baseline",), message, ids, similar)
    return preset


def _parent(reference: str, source: TomlSource, extended_by: tuple[Path, ...]) -> Preset:
    """Return the preset that this file extends. Raises UserError if it is missing or extends this file in turn."""
    chain = (*extended_by, source.path)
    with source.locating("extends"):
        if reference.endswith(".toml"):
            path = source.path.parent / os.path.expanduser(reference)
        elif reference == source.path.stem and source.path.parent == user_directory():
            # A user's preset of the same name refines the shipped one it hides.
            path = shipped_directory() / f"{reference}.toml"
            if not path.is_file():
                path = source.path
        else:
            path = _file_of(reference, reference)
    if os.path.realpath(path) in [os.path.realpath(file) for file in chain]:
        circle = " extends ".join([*(file.stem for file in chain), path.stem])
        raise source.error_at(("extends",), f"a preset cannot extend itself: {circle}")
    return _load_file(path, chain)


def _merged_model(base: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """`[model]` with these overrides; only they remain if they name another model, which need not have the fields."""
    return dict(overrides) if any(key in overrides for key in MODEL_SOURCES) else {**base, **overrides}


def _merged(parent: Preset, child: Preset, *, has_title: bool) -> Preset:
    """Return `child` with everything of its parent that it does not set; `has_title` if it has a title of its own."""
    return replace(
        child,
        title=child.title if has_title else parent.title,
        model=_merged_model(parent.model, child.model),
        data={**parent.data, **child.data},
        knobs={**parent.knobs, **child.knobs},
        baseline=child.baseline or (parent.baseline if not child.variants else None),
        variants=child.variants or parent.variants,
        files=(*child.files, *parent.files),
    )


def _model(raw: Mapping[str, Any], source: TomlSource, at: KeyPath, *, needs_source: bool) -> dict[str, Any]:
    model = source.table(raw, "model", at)
    sources = [key for key in model if key in MODEL_SOURCES]
    if len(sources) > 1 or (needs_source and not sources):
        message = f"[model] needs exactly one of hub, path, family; it has {' and '.join(sources) or 'none'}"
        raise source.error_at((*at, "model", *sources[1:2]), message, allowed=MODEL_SOURCES)
    for key, value in model.items():
        with source.locating(*at, "model", key):
            read_model_field(key, value)
    if "path" in model:
        model["path"] = os.path.realpath(source.path.parent / os.path.expanduser(model["path"]))
    return model


def _data(raw: Mapping[str, Any], source: TomlSource, at: KeyPath) -> dict[str, Any]:
    data = source.table(raw, "data", at)
    for key, value in data.items():
        with source.locating(*at, "data", key):
            data[key] = read_data_field(key, value)
    if "paths" in data:
        data["paths"] = [str(source.path.parent / os.path.expanduser(path)) for path in data["paths"]]
    return data


def read_model_field(key: str, value: object) -> object:
    """Return one field of `[model]`. Raises UserError naming `model.KEY` for a source that is no text, or is empty.

    Also for an empty key, and for a value that no record can hold.
    """
    if not key:
        raise UserError("there is no model field ''", key="model.")
    if key in MODEL_SOURCES and (not isinstance(value, str) or not value):
        raise UserError(f"model.{key} must be text, not {value!r}", key=f"model.{key}")
    if (kind := _unrecordable(value)) is not None:
        raise UserError(f"model.{key} cannot be {kind}", key=f"model.{key}")
    return value


def _unrecordable(value: object) -> str | None:
    """Return the kind of a value that TOML or `run.json` cannot hold; None for any other."""
    if isinstance(value, dict | list):
        items: Iterable[object] = value.values() if isinstance(value, dict) else value
        return next(filter(None, map(_unrecordable, items)), None)
    if value is None:
        return "null"
    if isinstance(value, datetime.date | datetime.time):
        return "a date or a time"
    if isinstance(value, str) and "\0" in value:
        return "text with a NUL character"
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return "a whole number of more than 64 bits"
    return "infinite or NaN" if isinstance(value, float) and not math.isfinite(value) else None


def read_data_field(key: str, value: object) -> object:
    """One field of `[data]`, checked; raises UserError naming `data.KEY`."""
    if key not in DATA_KEYS:
        # A preset's `samples` is a knob, though it is about the data.
        similar = f"{key}={value}" if key in KNOBS_BY_NAME else nearest(key, DATA_KEYS)
        message = f"there is no data field {key!r}"
        raise UserError(message, key=f"data.{key}", allowed=DATA_KEYS, nearest=similar)
    if key == "paths":
        paths = [value] if isinstance(value, str) else value
        if not isinstance(paths, list) or not paths or not all(isinstance(path, str) for path in paths):
            raise UserError("data.paths must be a list of files or globs", key="data.paths")
        return paths
    if not isinstance(value, str):
        raise UserError(f"data.{key} must be text, not {value!r}", key=f"data.{key}")
    options = {"kind": DATA_KINDS, "objective": TRAINING_OBJECTIVES, "texts": DATA_TEXTS}.get(key)
    if options and value not in options:
        message, similar = f"data.{key} {value!r} is not known", nearest(value, options)
        raise UserError(message, key=f"data.{key}", allowed=options, nearest=similar)
    return value


def _variants(raw: Mapping[str, Any], source: TomlSource) -> tuple[Variant, ...]:
    rows = raw.get("variants", [])
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise source.error_at(("variants",), "variants must be tables: [[variants]]")
    variants: list[Variant] = []
    for index, row in enumerate(rows):
        at = ("variants", index)
        source.refuse_unknown_keys(row, VARIANT_KEYS, at)
        id = source.text(row, "id", at)
        if not id:
            raise source.error_at(at, "a variant needs an id", allowed=VARIANT_KEYS)
        if id in [variant.id for variant in variants]:
            raise source.error_at((*at, "id"), f"two variants are called {id!r}")
        variants.append(
            Variant(
                id,
                source.knobs(source.table(row, "knobs", at), (*at, "knobs")),
                source.table(row, "published", at),
                _model(row, source, at, needs_source=False),
                _data(row, source, at),
            )
        )
    return tuple(variants)


KeyPath = tuple[str | int, ...]
"""The keys that lead to a value, such as ("variants", 1, "knobs", "batch_size")."""


class TomlSource(msgspec.Struct, frozen=True):
    """The text of a preset's file. Every method but `error_at` and `locating` raises UserError for a bad value."""

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
        line = _line_of(self.content, at)
        where = f"{self.path}:{line}" if line else str(self.path)
        key = ".".join(map(str, at))
        return UserError(message, key=key, allowed=allowed, nearest=nearest, advice=advice, where=where)

    @contextmanager
    def locating(self, *at: str | int) -> Iterator[None]:
        """Give an error about the value at this key its file and line."""
        try:
            yield
        except UserError as error:
            raise self.error_at(at, error.message, error.allowed, error.nearest, error.advice) from None

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
            with self.locating(*at, name):
                values[name] = knob(name).read(value)
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


def _line_of(text: str, path: KeyPath) -> int | None:
    """Return the line (from 1) of the innermost of these keys that the file has once; None without one."""
    for key in map(str, reversed(path)):
        is_key = re.compile(rf"(?:.*[\[{{,.])?\s*[\"']?{re.escape(key)}[\"']?\s*[=\].]")
        lines = [number for number, line in enumerate(text.splitlines(), 1) if is_key.match(line)]
        if key and len(lines) == 1:
            return lines[0]
    return None

"""Save settings as a preset of the user's own: the text of the original, with only the changes rewritten."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

import tomlkit
from tomlkit.exceptions import TOMLKitError
from tomlkit.toml_document import TOMLDocument

from trainfast_runner.errors import UserError
from trainfast_runner.records.home import reason_of
from trainfast_runner.records.json_lines import write_atomically
from trainfast_runner.settings import presets
from trainfast_runner.settings.knob_values import KnobValues
from trainfast_runner.settings.knobs import KNOBS_BY_NAME, knob
from trainfast_runner.settings.presets import SCHEMA, read_toml
from trainfast_runner.settings.script_preset import ScriptPreset
from trainfast_runner.settings.spec import RunSpec, from_preset
from trainfast_runner.units import comments, escaped
from trainfast_runner.worker.shared.host import make_private

PRESET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,63}")


def save_preset(name: str, spec: RunSpec, *, overwrite: bool = False, source: str | None = None) -> Path:
    """Write `spec` as the user's preset `name` and return its file; comments of the original stay.

    `source` is the path that the spec was resolved from, unless it was a preset's name. A spec of a variant
    becomes a preset without variants. Raises UserError for a bad name, an existing preset of the user's or a
    shipped one of that name without `overwrite`, and a directory that cannot be written.
    """
    path = new_preset_path(name, overwrite=overwrite)
    preset, _ = presets.load(source or spec.preset)
    document = _document(preset)
    if spec.variant is None and os.path.realpath(path) in map(os.path.realpath, preset.files[1:]):
        # The file to write is one that the preset extends: its values would be lost.
        raise UserError(f"{path.stem} would extend itself", key="name", advice="another name")
    _update(document, spec, preset)
    write_preset(path, tomlkit.dumps(document))
    return path


def new_preset_path(name: str, *, overwrite: bool) -> Path:
    """The file of a new preset of the user's. Raises UserError as `save_preset` does for its name."""
    if not PRESET_NAME.fullmatch(name) or name.endswith(".toml"):
        raise UserError(
            f"{name!r} cannot name a preset",
            key="name",
            allowed=["up to 64 letters, digits and . _ + -, the first a letter or digit, without .toml"],
        )
    path = presets.user_directory() / f"{name}.toml"
    message = None
    if path.exists():
        message = f"you already have a preset {name}: {path}"
    elif (presets.shipped_directory() / path.name).is_file():
        message = f"{name} would hide the shipped preset of that name"
    if message is not None and not overwrite:
        raise UserError(message, key="name", advice="another name", option="another name, or --overwrite")
    return path


def write_preset(path: Path, text: str) -> None:
    """Write the file of a preset. Raises UserError for a text that is not UTF-8, or if the file cannot be written."""
    try:
        content = text.encode()
    except UnicodeEncodeError as error:
        word = text[: error.end].split()[-1]
        raise UserError(f"{os.fsencode(word)!r} is not UTF-8 and cannot be saved", key="name") from None
    try:
        make_private(path.parent)
        write_atomically(path, content)
    except OSError as error:
        raise UserError(f"cannot use {path.parent}: {reason_of(error)}", key="XDG_CONFIG_HOME") from None


def _document(preset: presets.Preset) -> TOMLDocument:
    try:
        return tomlkit.parse(read_toml(preset.files[0])[0].content)
    except TOMLKitError as error:
        raise UserError(f"cannot read preset {preset.files[0]}: {error}", key=preset.name) from None


def _update(document: TOMLDocument, spec: RunSpec, preset: presets.Preset) -> None:
    """Write the spec's values into the preset's document where they differ from the preset's own."""
    saved_spec = from_preset(preset, None)
    parent = document.get("extends")
    if isinstance(parent, str) and parent.endswith(".toml"):
        document["extends"] = os.path.realpath(preset.files[0].parent / os.path.expanduser(parent))
    if spec.variant is not None:
        # The variant's knobs are among the spec's; as variants they would be applied a second time.
        for key in ("variants", "baseline"):
            document.pop(key, None)
        if parent is not None:
            _flatten(document, preset)
    saved_model = saved_spec.model
    if any(spec.model.get(key) != saved_model.get(key) for key in presets.MODEL_SOURCES):
        # Every field of another model is written.
        saved_model = {}
    _set_values(document, "model", spec.model, saved_model, relative=("path",))
    data = dict(spec.data)
    if "paths" in data:
        data["paths"] = [os.path.abspath(os.path.expanduser(path)) for path in data["paths"]]
    _set_values(document, "data", data, saved_spec.data, relative=("paths",))
    _set_values(document, "knobs", _toml_values(spec.knobs), _toml_values(saved_spec.knobs))


def _toml_values(knobs: KnobValues) -> dict[str, Any]:
    return {name: KNOBS_BY_NAME[name].toml_value(value) for name, value in knobs.items()}


def _flatten(document: TOMLDocument, preset: presets.Preset) -> None:
    """Cut the document from its parent, whose variants would come along, and write the parent's values into it."""
    document.pop("extends", None)
    document.setdefault("title", preset.title)
    for section, values in (("model", preset.model), ("data", preset.data), ("knobs", _toml_values(preset.knobs))):
        table = _table(document, section)
        for key, value in values.items():
            table.setdefault(key, _in_one_line(value))


def _set_values(
    document: TOMLDocument,
    section: str,
    values: dict[str, Any],
    saved_values: dict[str, Any],
    relative: tuple[str, ...] = (),
) -> None:
    """Write the values that differ from the saved ones, and the `relative` paths: the file moves to another folder."""
    present = document.get(section, {})
    changed_values = {
        key: value
        for key, value in values.items()
        if key not in saved_values or value != saved_values[key] or (key in relative and key in present)
    }
    removed_keys = [key for key in present if key not in values]
    if not changed_values and not removed_keys:
        return
    table = _table(document, section)
    for key, value in changed_values.items():
        table[key] = _in_one_line(value)
    for key in removed_keys:
        # Looked up for each key: the view of a table in several places is wrong after one of its keys is removed.
        del _table(document, section)[key]


def _in_one_line(value: Any) -> Any:
    """The value; a table as an inline one, because a header would take the dotted keys that follow it."""
    if not isinstance(value, dict):
        return value
    table = tomlkit.inline_table()
    table.update(value)
    return table


def _table(document: TOMLDocument, section: str) -> MutableMapping[str, Any]:
    """The table of the section, which is added if it is missing."""
    if section not in document:
        document[section] = tomlkit.table()
    table = document[section]
    assert isinstance(table, MutableMapping)
    return table


def save_script_preset(preset: ScriptPreset, reasons: Mapping[str, str], *, overwrite: bool = False) -> Path:
    """Write the preset and return its file; `reasons`, by knob, become comments after the knobs' flags.

    Raises UserError as `save_preset` does.
    """
    path = new_preset_path(preset.name, overwrite=overwrite)
    write_preset(path, script_preset_text(preset, reasons))
    return path


def script_preset_text(preset: ScriptPreset, reasons: Mapping[str, str]) -> str:
    """A whole preset of a script as TOML; `reasons` as in `save_script_preset`."""
    document = tomlkit.document()
    document["schema"] = SCHEMA
    document["title"] = preset.title
    script = tomlkit.table()
    script["command"] = list(preset.command)
    script["cwd"] = preset.cwd
    if preset.framework:
        script["framework"] = preset.framework
    by_knob = tomlkit.table()
    for name, flag_words in preset.flag_words.items():
        words = tomlkit.item(flag_words)
        if isinstance(flag_words, dict):
            words = tomlkit.inline_table()
            words.update(flag_words)
        if name in reasons:
            words.comment(comments([reasons[name]])[0])
        by_knob.append(name, words)
    script["knobs"] = by_knob
    document["script"] = script
    knobs = tomlkit.table()
    for name, value in preset.knobs.items():
        knobs[name] = knob(name).toml_value(value)
    document["knobs"] = knobs
    return escaped(tomlkit.dumps(document))

"""Save settings as a preset of the user's own."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomlkit

from trainfast_runner.errors import UserError
from trainfast_runner.records.home import reason_of
from trainfast_runner.records.json_lines import write_atomically
from trainfast_runner.settings import presets
from trainfast_runner.settings.knob_values import KnobValues
from trainfast_runner.settings.knobs import defaults, knob
from trainfast_runner.settings.presets import SCHEMA, Variant
from trainfast_runner.settings.script_preset import ScriptPreset
from trainfast_runner.settings.spec import RunSpec
from trainfast_runner.units import comments, escaped
from trainfast_runner.worker.shared.host import make_private

PRESET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,63}")


def save_preset(name: str, spec: RunSpec, *, overwrite: bool = False, source: str | None = None) -> Path:
    """Write `spec` as the user's preset `name`, whole and with the variants of its preset, and return its file.

    `source` is the path that the spec was resolved from, unless it was a preset's name. A spec of a variant becomes a
    preset without variants. Raises UserError for a bad name, an existing preset of the user's or a shipped one of that
    name without `overwrite`, and a directory that cannot be written.
    """
    path = new_preset_path(name, overwrite=overwrite)
    preset, variant = presets.load(source or spec.preset)
    set_knobs = {*preset.knobs, *(variant.knobs if variant is not None else ())}
    knobs = {name: value for name, value in spec.knobs.items() if name in set_knobs or value != defaults()[name]}
    data = dict(spec.data)
    if "paths" in data:
        data["paths"] = [os.path.abspath(os.path.expanduser(path)) for path in data["paths"]]
    variants = preset.variants if spec.variant is None else ()
    write_preset(path, preset_text(spec.title, spec.model, data, knobs, variants, preset.baseline))
    return path


def preset_text(
    title: str,
    model: Mapping[str, Any],
    data: Mapping[str, Any],
    knobs: KnobValues,
    variants: tuple[Variant, ...] = (),
    baseline: str | None = None,
) -> str:
    """A whole preset of a model as TOML; a knob without a value is left out."""
    head: dict[str, Any] = {"schema": SCHEMA, "title": title}
    if variants and baseline is not None:
        head["baseline"] = baseline
    set_knobs = {name: value for name, value in knobs.items() if value is not None}
    tables: dict[str, Any] = {"model": model, "data": data, "knobs": set_knobs}
    if variants:
        tables["variants"] = [
            {"id": row.id} | {key: table for key in presets.VARIANT_KEYS[1:] if (table := getattr(row, key))}
            for row in variants
        ]
    return escaped(tomlkit.dumps(head | tables).strip()) + "\n"


def new_preset_path(name: str, *, overwrite: bool) -> Path:
    """The file of a new preset of the user's. Raises UserError as `save_preset` does for its name."""
    if not PRESET_NAME.fullmatch(name) or name.endswith(".toml"):
        allowed = ["up to 64 letters, digits and . _ + -, the first a letter or digit, without .toml"]
        raise UserError(f"{name!r} cannot name a preset", key="name", allowed=allowed)
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


def save_script_preset(preset: ScriptPreset, reasons: Mapping[str, str], *, overwrite: bool = False) -> Path:
    """Write the preset and return its file; `reasons`, by knob, become comments after the knobs' flags.

    Raises UserError as `save_preset` does.
    """
    path = new_preset_path(preset.name, overwrite=overwrite)
    write_preset(path, script_preset_text(preset, reasons))
    return path


def script_preset_text(preset: ScriptPreset, reasons: Mapping[str, str]) -> str:
    """A whole preset of a script as TOML; `reasons` as in `save_script_preset`."""
    script: dict[str, Any] = {"command": list(preset.command), "cwd": preset.cwd}
    if preset.framework:
        script["framework"] = preset.framework
    by_knob = script["knobs"] = tomlkit.table()
    for name, flag_words in preset.flag_words.items():
        words = tomlkit.item(flag_words)
        if isinstance(flag_words, dict):
            words = tomlkit.inline_table()
            words.update(flag_words)
        if name in reasons:
            words.comment(comments([reasons[name]])[0])
        by_knob.append(name, words)
    # TOML has no null.
    knobs = {name: knob(name).text_of(None) if value is None else value for name, value in preset.knobs.items()}
    document = tomlkit.document()
    document.update({"schema": SCHEMA, "title": preset.title, "script": script, "knobs": knobs})
    return escaped(tomlkit.dumps(document))

"""A run's settings for trainfast-tui: as a command, and as a whole preset."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tomlkit

from trainfast_runner.errors import UserError
from trainfast_runner.export.export_text import ExportText
from trainfast_runner.export.trainer_command import trainer_comments
from trainfast_runner.plain_text import comments, escaped, file_name, shell_line
from trainfast_runner.records.run_file import RunFile
from trainfast_runner.settings import presets
from trainfast_runner.settings.knob_type import KnobValues
from trainfast_runner.settings.knobs import KNOBS_BY_NAME, not_at_default
from trainfast_runner.settings.spec import RunSpec, from_preset, read_toml_value
from trainfast_runner.settings.strategy_of_run import strategy_of

MAX_WORD_BYTES = (128 << 10) - 1
"""Longest word of a command, without its closing null byte (MAX_ARG_STRLEN in Linux's binfmts.h)."""


def run_command(run: RunFile, knobs: KnobValues, directory: Path) -> ExportText:
    """The command that starts the same run again, and as comments those that start a script like it."""
    return ExportText(
        "\n".join([_trainfast_command(run, knobs), *comments(trainer_comments(run, knobs, directory))]), [], "run.sh"
    )


def whole_preset(run: RunFile, knobs: KnobValues, _directory: Path) -> ExportText:
    """A whole preset with the knobs that are not at their defaults."""
    alone = strategy_of(knobs).one_device and "devices" not in run.overrides
    changed_knobs = {
        name: value
        for name, value in not_at_default(knobs).items()
        if KNOBS_BY_NAME[name].applies(knobs) and not (name == "devices" and alone)
    }
    text = preset_text(run.title or run.preset, run.model, run.data, changed_knobs)
    return ExportText(text, [], file_name(run.preset, ".toml"))


def preset_text(title: str, model: dict[str, Any], data: dict[str, Any], knobs: KnobValues) -> str:
    """A whole preset as TOML; a knob without a value is left out."""
    document = tomlkit.document()
    document["schema"] = presets.SCHEMA
    document["title"] = title
    document["model"] = model
    document["data"] = data
    document["knobs"] = {name: value for name, value in knobs.items() if value is not None}
    return escaped(tomlkit.dumps(document).strip())


def _trainfast_command(run: RunFile, knobs: KnobValues) -> str:
    """The command that starts the same run again; a preset without a name is spelled out field by field."""
    reference, spec = _named_preset(run)
    # Naming the model's source again drops every field of the preset's model.
    source = next((key for key in presets.MODEL_SOURCES if key in run.model), None)
    if source is None:
        raise UserError(f"{run.run_id} has no model in its run.json", key="model")
    names_source = spec.model.get(source) != run.model[source] or not spec.model.keys() <= run.model.keys()
    model = dict(sorted(run.model.items(), key=lambda field: field[0] != source)) if names_source else run.model
    words = ["trainfast-tui", "run", reference]
    sections = (("model.", model, {} if names_source else spec.model), ("data.", run.data, spec.data))
    for section, fields, preset_fields in sections:
        for name, value in fields.items():
            # Recorded paths are expanded, so they differ from the preset's even where --set did not change them.
            is_same_kind = fields.get("kind") == preset_fields.get("kind")
            is_expanded = name == "paths" and "data.paths" not in run.overrides and is_same_kind
            if value != preset_fields.get(name) and not is_expanded:
                text = _joined_paths(value) if name == "paths" else _toml_text(value)
                words += ["--set", f"{section}{name}={text}"]
    for name, value in knobs.items():
        if value != spec.knobs[name] and not (name in ("devices", "watch") and name not in run.overrides):
            words += ["--set", f"{name}={KNOBS_BY_NAME[name].text_of(value)}"]
    return shell_line(words)


def _named_preset(run: RunFile) -> tuple[str, RunSpec]:
    """The preset a command can start from: the run's own where it is known by that name, else a shipped one."""
    try:
        spec = from_preset(*presets.load(run.name))
    except UserError:
        # The preset was a file, named by its path.
        spec = None
    # Such a file may have the name of another preset, whose data a command cannot take back.
    if spec is not None and spec.data.keys() <= run.data.keys():
        return run.name, spec
    return presets.PLAIN_PRESET, from_preset(*presets.load(presets.PLAIN_PRESET))


def _joined_paths(paths: Sequence[object]) -> str:
    """The text that `data.paths` reads as these paths. Raises UserError if no command can hold them."""
    text = "+".join(map(str, paths))
    if text.split("+") != list(map(str, paths)):
        raise UserError(
            "a path in data.paths contains +, which separates paths",
            key="data.paths",
            advice="--to preset",
        )
    if len(os.fsencode(f"data.paths={text}")) > MAX_WORD_BYTES:
        raise UserError(
            f"data.paths names {len(paths):,} files, too many for a command", key="data.paths", advice="--to preset"
        )
    return text


def _toml_text(value: object) -> str:
    """The text that `read_toml_value` reads as this value of a model's field."""
    return value if isinstance(value, str) and read_toml_value(value) == value else _on_one_line(value)


def _on_one_line(value: object) -> str:
    """A TOML value without line breaks; tomlkit writes a table as lines of their own."""
    if isinstance(value, dict):
        pairs = (f"{tomlkit.item(key).as_string()} = {_on_one_line(entry)}" for key, entry in value.items())
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_on_one_line, value)) + "]"
    return str(tomlkit.item(value).as_string())

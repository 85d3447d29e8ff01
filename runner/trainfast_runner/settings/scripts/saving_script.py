"""Save a script's command and the flags of its knobs as a preset of the user's own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import tomlkit

from trainfast_runner.plain_text import comments, escaped
from trainfast_runner.settings.knobs import knob
from trainfast_runner.settings.presets import SCHEMA
from trainfast_runner.settings.saving import new_preset_path, write_preset
from trainfast_runner.settings.scripts.script_preset import ScriptPreset


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

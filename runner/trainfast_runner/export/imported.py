"""Read settings from a script, a command or a configuration of another tool, as knobs. Nothing is executed."""

from __future__ import annotations

import ast
import json
import shlex
import tomllib
from dataclasses import dataclass, field
from typing import Any

import yaml

from trainfast_runner.errors import UserError
from trainfast_runner.export.call_fields import TRAINER_CALLS
from trainfast_runner.export.python_calls import calls_of
from trainfast_runner.export.shell_words import LOGICAL_LINE, Word, flags_of, index_of_script, literal, script_commands
from trainfast_runner.export.trainfast_command import preset_text
from trainfast_runner.settings.knob_type import KnobValues
from trainfast_runner.settings.knobs import not_at_default
from trainfast_runner.settings.other_tools.to_knobs import (
    ForeignKnobs,
    from_accelerate,
    from_deepspeed,
    from_trainer_fields,
)
from trainfast_runner.settings.presets import user_directory
from trainfast_runner.settings.scripts import script_preset
from trainfast_runner.settings.spec import RunSpec, resolve

TRAINER_BLOCK = "a TrainingArguments block"
ACCELERATE_YAML = "an accelerate YAML"
DEEPSPEED_JSON = "a DeepSpeed json"
SHELL_COMMAND = "a shell command"
IMPORTED_KINDS = (TRAINER_BLOCK, ACCELERATE_YAML, DEEPSPEED_JSON, SHELL_COMMAND)
"""Kinds of text that another tool reads."""


@dataclass(frozen=True)
class Imported:
    """The kind of a text, its knobs, and the settings that were not understood, as text. `preset` is TOML."""

    kind: str
    knobs: KnobValues
    not_understood: tuple[str, ...]
    preset: str = field(repr=False)


def import_settings(text: str, name: str, base: str) -> Imported:
    """Read the settings in `text`; all others are the preset `base`'s. `name` is for the preset's title and for errors.

    Raises UserError for a text of no known kind, for a preset, and for a `base` of a script.
    """
    _refuse_preset(text, name)
    spec = spec_of_command(text)
    if spec is not None:
        changed = {key: spec.knobs[key] for key in spec.knobs if key in spec.overrides}
        return Imported("a trainfast-tui command", changed, (), _preset(name, spec, {}))
    if script_preset.path_of(base) is not None:
        raise UserError(
            f"{base} is the preset of a script, which has no model and data to import",
            where="--from",
            key="--from",
            advice="--from tiny-llama, or another preset with [model]",
        )
    kind, settings = _kind_and_settings(text, name)
    return Imported(kind, settings.knobs, tuple(settings.not_understood), _preset(name, resolve(base), settings.knobs))


def _refuse_preset(text: str, name: str) -> None:
    """Raises UserError for the text of a preset, which needs no import."""
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError):
        return
    if "schema" in table and table.keys() & {"model", "script", "extends", "knobs"}:
        file = name if name.endswith(".toml") else "FILE.toml"
        raise UserError(
            f"{name} is a preset already",
            key=name,
            advice=f"trainfast-tui run {file}; by its name alone once it is in {user_directory()}",
        )


def _kind_and_settings(text: str, name: str) -> tuple[str, ForeignKnobs]:
    block = _trainer_block(text, name)
    if block is not None:
        return TRAINER_BLOCK, block
    if text.lstrip().startswith("{"):
        try:
            config = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{name} is not valid JSON: {error}", key=name) from None
        return DEEPSPEED_JSON, from_deepspeed(config)
    table = _yaml(text)
    if table is not None:
        return ACCELERATE_YAML, from_accelerate(table)
    commands = script_commands(text)
    if len(commands) == 1:
        return SHELL_COMMAND, _command(commands[0])
    if len(commands) > 1:
        raise UserError(f"{name} starts {len(commands)} scripts: name a file with the one that trains", key=name)
    raise UserError(f"cannot tell what {name} is", key=name, allowed=IMPORTED_KINDS)


def _trainer_block(text: str, name: str) -> ForeignKnobs | None:
    """The fields of the only TrainingArguments call; None for a text that is not Python or has none."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        # The last two: expressions too deep for the parser.
        return None
    calls = list(calls_of(tree, TRAINER_CALLS))
    if len(calls) > 1:
        lines = ", ".join(str(call.lineno) for call in calls)
        raise UserError(f"TrainingArguments is called in lines {lines}: keep the one that trains", key=name)
    if not calls:
        return None
    fields: dict[str, Any] = {}
    unknown = []
    for keyword in calls[0].keywords:
        try:
            fields[str(keyword.arg)] = ast.literal_eval(keyword.value)
        except (ValueError, TypeError):
            unknown.append(f"{keyword.arg or '**'}={ast.unparse(keyword.value)} (line {keyword.value.lineno})")
    foreign = from_trainer_fields(fields)
    return ForeignKnobs(foreign.knobs, [*foreign.not_understood, *unknown])


def _yaml(text: str) -> dict[str, Any] | None:
    """A configuration of accelerate; None for another text."""
    try:
        table = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        # ValueError for an impossible date, RecursionError for levels too deep for the parser.
        return None
    accelerate_keys = ("distributed_type", "mixed_precision", "num_processes")
    return table if isinstance(table, dict) and any(key in table for key in accelerate_keys) else None


def _command(words: list[Word]) -> ForeignKnobs:
    """The flags after the script as fields of TrainingArguments, and the launcher's processes."""
    index = index_of_script(words) or 0
    flags = flags_of(words[index + 1 :])
    fields = {name: True if value is None else literal(value.value) for name, (_, value) in flags.items()}
    launch = flags_of(words[:index])
    mixed = launch.pop("mixed_precision", (None, None))[1]
    if mixed is not None:
        # The script's own flag wins over the launcher's.
        fields.setdefault("mixed_precision", mixed.value)
    foreign = from_trainer_fields(fields)
    knobs, not_understood = dict(foreign.knobs), list(foreign.not_understood)
    for option in ("nproc_per_node", "num_processes", "num_gpus"):
        count = launch.pop(option, (None, None))[1]
        if count is not None and not count.value.isdecimal():
            not_understood.append(f"--{option} {count.value}")
        elif count is not None and int(count.value) > 1:
            knobs["devices"] = int(count.value)
            knobs.setdefault("strategy", "ddp")
    launch.pop("standalone", None)
    if any(word.value == "NCCL_P2P_DISABLE=1" for word in words[:index]):
        knobs["p2p"] = "off"
    return ForeignKnobs(knobs, [*not_understood, *(f"--{name}" for name in launch)])


def spec_of_command(text: str) -> RunSpec | None:
    """The run of a `trainfast-tui run PRESET --set ...` command; None for another text. Raises UserError."""
    lines = (line[0].strip() for line in LOGICAL_LINE.finditer(text))
    first = next((line for line in lines if line and not line.startswith("#")), "")
    try:
        words = shlex.split(first.replace("\\\n", ""), comments=True)
    except ValueError:
        return None
    if words[:2] != ["trainfast-tui", "run"] or len(words) < 3 or words[2].startswith("-"):
        return None
    settings = [
        next_word if word == "--set" else word.removeprefix("--set=")
        for word, next_word in zip(words, [*words[1:], ""], strict=True)
        if word == "--set" or word.startswith("--set=")
    ]
    return resolve(words[2], settings)


def _preset(name: str, spec: RunSpec, knobs: KnobValues) -> str:
    changed_knobs = not_at_default({**spec.knobs, **knobs})
    return preset_text(f"imported from {name}", spec.model, spec.data, changed_knobs)

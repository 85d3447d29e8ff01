"""The preset that discovery makes of a script: its command, the mapped flags, and the values it runs with now."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trainfast_runner.machine import training_python
from trainfast_runner.records.discovered import Discovered
from trainfast_runner.running.scripts.command import read_command
from trainfast_runner.settings.knob_type import KnobValues
from trainfast_runner.settings.knobs import KNOBS_BY_NAME
from trainfast_runner.settings.scripts.script_mapping import KEPT_KNOBS, FlagMapping
from trainfast_runner.settings.scripts.script_preset import ScriptPreset


def preset_of(
    typed: Sequence[str],
    discovered: Discovered,
    mappings: Iterable[FlagMapping],
    *,
    name: str,
    cwd: str,
    python: str | None = None,
) -> ScriptPreset:
    """The preset `name` of a command that starts in `cwd`; of its knobs, those that a search begins with have values.

    `python` replaces the command's interpreter.
    """
    mappings = list(mappings)
    mapped_knobs: KnobValues = {
        mapping.knob: mapping.value for mapping in mappings if mapping.knob in KEPT_KNOBS and mapping.value is not None
    }
    command = read_command(typed, None if python is None else training_python.find_python(python), cwd)
    return ScriptPreset(
        command=tuple(typed),
        flag_words={mapping.knob: mapping.flag_words for mapping in mappings},
        knobs=_trainer_knobs(discovered.fields) | mapped_knobs,
        name=name,
        title=command.title,
        cwd=cwd,
        framework=discovered.framework or "",
    )


def _trainer_knobs(fields: Mapping[str, Any]) -> KnobValues:
    """The knobs that a script's own TrainingArguments set, of those that a search begins with; empty without fields."""
    if not fields:
        return {}
    # transformers renamed the field, and leaves None, not False, in switches that nobody set.
    is_checkpointed = fields.get("activation_checkpointing") or fields.get("gradient_checkpointing")
    knobs: KnobValues = {"checkpointing": "full" if is_checkpointed else "off"}
    precisions = [name for name in ("bf16", "fp16", "tf32") if fields.get(name) is not None]
    if precisions:
        knobs["precision"] = next((name for name in precisions if fields[name]), "fp32")
    for name in ("batch_size", "grad_accum", "workers"):
        value = fields.get(KNOBS_BY_NAME[name].same_as.trainer_field or "")
        if value is not None:
            knobs[name] = KNOBS_BY_NAME[name].read(value)
    return {name: knobs[name] for name in KEPT_KNOBS if name in knobs}

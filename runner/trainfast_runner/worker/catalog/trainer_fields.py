"""Fields of TrainingArguments as transformers has named them over time. Standard library only."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from .levers import LEVERS, LeverEntry

_CHECKPOINTING, _ARGUMENTS = "gradient_checkpointing", "gradient_checkpointing_kwargs"
NEWER_NAMES = {_CHECKPOINTING: "activation_checkpointing", _ARGUMENTS: "activation_checkpointing_kwargs"}
"""Fields by their first names, with the names that took their place."""
FIRST_VERSIONS = {**dict.fromkeys(NEWER_NAMES.values(), (5, 23)), "train_sampling_strategy": (5, 2)}
"""The first version of transformers with a field that an older one has by another name."""


LEVERS_TAKEN = {
    name: tuple(value.name for value in entry.values if value.trainer_fields is not None)
    for name, entry in LEVERS.items()
    if any(value.trainer_fields for value in entry.values[1:])
}
"""The values that fields can give each lever."""


def named_fields(fields: Mapping[str, object], has: Callable[[str], bool]) -> dict[str, object]:
    """Return these fields by their names in a version; `has` tells which names it has."""
    named: dict[str, object] = {}
    for name, value in fields.items():
        newer = NEWER_NAMES.get(name, name)
        if name == "train_sampling_strategy" and not has(name):
            named["group_by_length"] = value == "group_by_length"
        elif name == _ARGUMENTS and not has(newer):
            named[name] = {"use_reentrant": False}  # arguments of torch only: it checkpoints every layer
        else:
            named[newer if has(newer) else name] = value
    return named


def levers_of_fields(read: Callable[[str, None], Any]) -> dict[str, str]:
    """Return the levers' values that the fields of TrainingArguments have; `read` gives a field, else its default."""
    values = {name: _value_of(LEVERS[name], read) for name in LEVERS_TAKEN}
    layers = (_field(_ARGUMENTS, read) or {}).get("every_n_layers") or 1
    if values["checkpointing"] == "full" and layers > 1:
        values["checkpointing"] = f"every-{layers}"
    if read("torch_compile", None):
        # With accumulation max-autotune is the Trainer's mode without CUDA graphs.
        values["compile"] = (read("torch_compile_mode", None) or "default").replace("-no-cudagraphs", "")
    kernels = _field("liger_kernel_config", read) or {}
    for name, kernel in (("kernels", "rms_norm"), ("loss", "fused_linear_cross_entropy")):
        # One switch for both, and a part that is not named is on.
        values[name] = values[name] if kernels.get(kernel, True) else LEVERS[name].plain
    return values


def _value_of(entry: LeverEntry, read: Callable[[str, None], Any]) -> str:
    """The value all of whose fields these are: of several the one with most."""
    best, name = -1, entry.plain
    for value in entry.values:
        fields = dict(value.trainer_fields or ())
        if value.trainer_fields and best < len(fields) and all(_is(_field(key, read), fields[key]) for key in fields):
            best, name = len(fields), value.name
    return name


def _field(name: str, read: Callable[[str, None], Any]) -> Any:
    newer = read(NEWER_NAMES.get(name, name), None)
    value = read(name, None) if newer is None else newer
    # A flag's text is JSON until the arguments are complete.
    return json.loads(value) if isinstance(value, str) and value.startswith("{") else value


def _is(live: Any, asked: Any) -> bool:
    """True if the field has what was asked for; how torch checkpoints is no part of it."""
    if not isinstance(asked, dict):
        return bool(live) == asked if isinstance(asked, bool) else bool(live == asked)
    return all((live or {}).get(key) == value for key, value in asked.items() if key != "use_reentrant")

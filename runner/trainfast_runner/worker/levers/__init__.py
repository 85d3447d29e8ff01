"""The levers of the catalog, one file each, which change a built model before its weights are initialized."""

import importlib
from typing import Any

from torch import nn

from ..catalog import LEVERS
from ..spec import Knobs


def apply_levers(model: nn.Module, knobs: Knobs) -> None:
    """Give the model each lever's value. Raises InvalidInput for a model that cannot have it."""
    for entry in LEVERS.values():
        path = entry[knobs.lever(entry.name)].path
        if path is not None:
            module, _, function = path.partition(":")
            getattr(importlib.import_module(f".{module}", __package__), function)(model, knobs)


def actual_fields(model: nn.Module) -> dict[str, Any]:
    """Return the fields of the `actual` record that each lever's file reads from the live model."""
    fields: dict[str, Any] = {}
    for entry in LEVERS.values():
        paths = [value.path for value in entry.values if value.path is not None]
        for module in dict.fromkeys([path.partition(":")[0] for path in paths] + [entry.reads] * bool(entry.reads)):
            fields |= importlib.import_module(f".{module}", __package__).actual(model)
    return fields

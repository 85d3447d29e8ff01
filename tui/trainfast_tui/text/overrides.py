"""Overrides of a preset, as they are typed after `--set`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.cells import cell_len

from trainfast_tui.text.format import truncate


def typed_overrides(overrides: Mapping[str, Any]) -> list[str]:
    """Return each override as `knob=value`, `model.FIELD=value` or `data.FIELD=value`."""
    return [f"{key}={_typed_value(key, value)}" for key, value in overrides.items()]


def short_overrides(overrides: Mapping[str, Any], cells: int) -> str:
    """Return as many whole overrides as fit in `cells`, else the first one cut, and how many more there are."""
    words = typed_overrides(overrides)
    for shown in range(len(words), 0, -1):
        hidden = f" +{len(words) - shown}" if shown < len(words) else ""
        text = " ".join(words[:shown]) + hidden
        if cell_len(text) <= cells:
            return text
    if not words:
        return ""
    hidden = f" +{len(words) - 1}" if len(words) > 1 else ""
    return truncate(words[0], cells - len(hidden)) + hidden


def field_text(value: Any, between: str = "+") -> str:
    """Return the value of a model or data field, with `between` between the entries of a list."""
    if isinstance(value, list):
        return between.join(field_text(entry, between) for entry in value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _typed_value(key: str, value: Any) -> str:
    from trainfast_runner.settings.knobs import KNOBS_BY_NAME

    if key in KNOBS_BY_NAME:
        return KNOBS_BY_NAME[key].text_of(value)
    return field_text(value)

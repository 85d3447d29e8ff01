"""The knobs that a search sets itself, whatever the person asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SET_BY_A_SEARCH = ("steps", "timing_warmup")
"""Knobs that either search sets; commands that differ only in these continue the same search."""
SET_BY_A_BATCH_SEARCH = ("batch_size", *SET_BY_A_SEARCH)


def without_search_settings(overrides: Mapping[str, Any], role: str | None) -> dict[str, Any]:
    """Return the overrides without those that a search sets in each of its runs; all of a run without a `role`."""
    if role is None:
        return dict(overrides)
    return {
        key: value
        for key, value in overrides.items()
        if key not in SET_BY_A_SEARCH and (key, value) != ("memory_limit", None)
    }

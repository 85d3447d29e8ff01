"""Fields of a model's configuration, whose names differ between families of models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def first_size(config: Mapping[str, Any], *names: str) -> tuple[str, int]:
    """Return the first of these fields that is a whole number above zero, and its value; "" and 0 without any."""
    sizes = ((name, config.get(name)) for name in names)
    return next(((name, size) for name, size in sizes if isinstance(size, int) and size > 0), ("", 0))

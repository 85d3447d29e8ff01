"""Packages that a library looks for and imports where it finds them, kept from it where they are of no use."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection
from typing import Any


def hide(names: Collection[str]) -> None:
    """From now on these packages are not there for whoever asks before importing."""
    real = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> Any:
        return None if name.partition(".")[0] in names else real(name, package)

    importlib.util.find_spec = find_spec

"""Hide installed packages from transformers, which imports those it finds. For the inspector and the tracer only.

The inspector then takes 2.4 s of CPU, and 8.9 s where it imports torch.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Collection
from typing import Any


def hide_packages(names: Collection[str]) -> None:
    """Have `importlib.util.find_spec` report these packages as not installed."""
    real = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> Any:
        return None if name.partition(".")[0] in names else real(name, package)

    importlib.util.find_spec = find_spec

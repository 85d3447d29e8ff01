"""The imports of the training stack, before a fork and before a run's memory is counted."""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Collection, Iterable
from contextlib import suppress
from typing import Any

STACK = ("torch._dynamo", "transformers.modeling_utils", "transformers.generation.utils")
"""Imported before a fork and before the go: a thousand modules, which take as long as torch.

A run imports them too, before its memory is counted. bitsandbytes and DeepSpeed look for a GPU when they are imported:
they wait for the go.
"""
HIDDEN_PACKAGES = (
    *("accelerate", "deepspeed", "peft", "kernels", "sklearn", "scipy", "tensorflow", "jax", "flax", "torchvision"),
)
"""Packages that transformers imports if installed, and that an answer does not use."""


def import_stack(models: Iterable[tuple[dict[str, Any], str]]) -> None:
    """Import torch, transformers and the code of these models with their objectives. Raises the error of an import."""
    for name in STACK:
        importlib.import_module(name)
    from .build import import_model_code
    from .model_config import resolve_config

    for model, objective in {json.dumps(one): one for one in models}.values():
        with suppress(Exception):  # building the model reports it
            import_model_code(resolve_config(model), objective)


def hide_packages(names: Collection[str]) -> None:
    """Hide installed packages from transformers, which imports those that `importlib.util.find_spec` finds."""
    real = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> Any:
        return None if name.partition(".")[0] in names else real(name, package)

    importlib.util.find_spec = find_spec

"""How much memory a training needs, known before it runs: by category, phase and batch size.

`trace_model` has the training Python take a step without memory (seconds, once); `MemoryModel` answers from what that
showed for any batch, number of ranks and sharding (arithmetic); `cached_model` finds an earlier trace at once.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainfast_runner.memory_model.model import MemoryModel
    from trainfast_runner.memory_model.prediction import CATEGORIES, PHASES, Prediction
    from trainfast_runner.memory_model.tracing import (
        Untraceable,
        cached_model,
        cached_models,
        trace_model,
        trace_models,
    )

__all__ = [
    "CATEGORIES",
    "PHASES",
    "MemoryModel",
    "Prediction",
    "Untraceable",
    "cached_model",
    "cached_models",
    "trace_model",
    "trace_models",
]
_IN = {"MemoryModel": "model", "CATEGORIES": "prediction", "PHASES": "prediction", "Prediction": "prediction"}


def __getattr__(name: str) -> object:
    """These are imported by whoever asks for them: one that needs a single file of this package has not all of it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(f"{__name__}.{_IN.get(name, 'tracing')}"), name)
    return found

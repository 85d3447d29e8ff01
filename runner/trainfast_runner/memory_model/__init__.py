"""How much memory a training needs, known before it runs: by category, phase and batch size.

`trace_model` has the training Python take a step without memory (seconds, once); `MemoryModel` answers from what that
showed for any batch, number of ranks and sharding (arithmetic); `cached_model` finds an earlier trace at once.
"""

from trainfast_runner.memory_model.model import MemoryModel
from trainfast_runner.memory_model.prediction import CATEGORIES, PHASES, Prediction
from trainfast_runner.memory_model.tracing import Untraceable, cached_model, cached_models, trace_model, trace_models

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

"""Engines take the steps: the loop here, the short Accelerate loop, or the Hugging Face Trainer.

Each engine trains the same samples in the same global batches with the same loss and writes the same step records, so
that two engines differ in their speed only.
"""

from __future__ import annotations

import importlib

from ..catalog import ENGINES
from ..model.objective import Objective
from ..spec import Knobs
from ..strategies.base import Strategy
from .base import Engine


def make_engine(knobs: Knobs, strategy: Strategy, objective: Objective) -> Engine:
    """Make the engine that the knobs name; its libraries are imported here, before any memory is counted."""
    module, _, name = ENGINES[knobs.engine].path.partition(":")
    engine: Engine = getattr(importlib.import_module(f".{module}", __package__), name)(knobs, strategy, objective)
    return engine

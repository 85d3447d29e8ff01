"""The phases of a run before its first step."""

from __future__ import annotations

STARTING = {
    "import": "importing the training stack",
    "data": "preparing the data",
    "model": "building the model",
    "train": "first step",
}
"""Words by the phase that the worker writes."""

"""The waits before a run's first step, and before a trace, in words."""

from __future__ import annotations

STARTING = {
    "import": "importing the training stack",
    "data": "preparing the data",
    "model": "building the model",
    "train": "first step",
}
"""Words by the phase that the worker writes."""


def importing_words(executable: str) -> str:
    """Return the reason a trace waits while this Python imports the training stack; empty once imported."""
    return f"importing torch and transformers in {executable} (first time: some seconds)" if executable else ""

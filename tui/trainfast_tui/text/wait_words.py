"""The waits before a process trains or traces, in words: imports, the model, other runs."""

from __future__ import annotations

from trainfast_tui.text.format import plain

START_WORDS = {
    "import": "importing the training stack",
    "data": "preparing the data",
    "compile": "compiling an extension",
    "model": "building the model",
    "train": "first step",
}
"""Words by the phase that the worker writes."""


def start_words(phase: str, detail: str | None) -> str:
    """Return the phase of a run without steps, with its detail, in words."""
    words = START_WORDS.get(phase, phase or "starting the training process")
    return words + (f" ({detail})" if detail else "")


def importing_words(executable: str) -> str:
    """Return the reason a trace waits while this Python imports the training stack; empty once imported."""
    return f"importing torch and transformers in {executable} (first time: some seconds)" if executable else ""


def wait_words(waits_for: str | None) -> str:
    """Return the wait of a live search for the run `waits_for`; empty if it waits for none."""
    return f"waiting for {plain(waits_for)} to end" if waits_for is not None else ""

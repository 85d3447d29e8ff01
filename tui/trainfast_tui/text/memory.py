"""The words for memory by category and for the phases of a step at whose peak it is measured."""

from __future__ import annotations

from trainfast_runner.records.run_file import RunFile

CATEGORIES = {
    "params": "parameters",
    "grads": "gradients",
    "optimizer": "optimizer states",
    "activations": "activations",
    "temporary": "temporary tensors",
    "communication": "communication buffers",
}
"""The categories of a prediction, by their JSON names."""
PHASES = {"forward_backward": "forward and backward", "optimizer": "the optimizer step"}


def short_category(category: str) -> str:
    """Return the category's first word, for a table or a legend."""
    return CATEGORIES.get(category, category).partition(" ")[0]


def peak_word(of_script: bool, on_cpu: bool) -> str:
    """Return the word for a peak: "resident" for a script's own on a CPU, whose allocator keeps freed blocks."""
    return "resident" if of_script and on_cpu else "allocated"


def peak_word_of(run: RunFile | None) -> str:
    """Return the word for the peak of a run, also of a live one."""
    return peak_word(run is not None and run.script is not None, run is not None and run.device == "cpu")

"""The words for the categories of memory, and for the phases of a step whose peaks are measured."""

from __future__ import annotations

from collections.abc import Mapping

from trainfast_runner.machine.telemetry.failures import UNIFIED_MEMORY
from trainfast_runner.records.run_file import RunFile
from trainfast_tui.text.format import percent_change, signed_percent, size

CATEGORY_WORDS = {
    "params": "parameters",
    "grads": "gradients",
    "optimizer": "optimizer states",
    "activations": "activations",
    "temporary": "temporary tensors",
    "communication": "communication buffers",
}
"""The categories of a prediction, by their JSON names."""
PHASE_WORDS = {"forward_backward": "forward and backward", "optimizer": "the optimizer step"}


def category_words(category: str) -> str:
    """Return the words for a category, or its name if this version does not know it."""
    return CATEGORY_WORDS.get(category, category)


def short_category(category: str) -> str:
    """Return the category's first word, for a table or a legend."""
    return category_words(category).partition(" ")[0]


def phase_words(phase: str) -> str:
    """Return the words for a phase of a step, or its name if this version does not know it."""
    return PHASE_WORDS.get(phase, phase)


def peak_word(*, of_script: bool, on_cpu: bool) -> str:
    """Return the word for a peak: "resident" for a script's own on a CPU, whose allocator keeps freed blocks."""
    return "resident" if of_script and on_cpu else "allocated"


def peak_word_of(run: RunFile | None) -> str:
    """Return the word for the peak of a run, also of a live one."""
    return peak_word(
        of_script=run is not None and run.script is not None, on_cpu=run is not None and run.device == "cpu"
    )


def against_predicted_memory(measured_bytes: float | None, predicted_bytes: float | None) -> str:
    """Return the prediction and its error: `predicted 419 MiB, -1.7 %`; empty without a prediction."""
    if not predicted_bytes:
        return ""
    words = f"predicted {size(predicted_bytes)}"
    if measured_bytes is None:
        return words
    return f"{words}, {signed_percent(percent_change(measured_bytes, predicted_bytes))}"


def no_memory_words(index: int, missing: Mapping[str, str]) -> str:
    """Return words in place of the memory that GPU `index` does not report; `missing` has the reasons of its tick."""
    reason = missing.get(f"gpu{index}.memory_total_bytes", "")
    return "shares the host's" if reason == UNIFIED_MEMORY else "unknown"

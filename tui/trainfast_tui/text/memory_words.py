"""The words for memory: its categories, the phases of a step whose peaks are measured, predictions and risks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from trainfast_runner.machine.telemetry.binding import UNIFIED_MEMORY
from trainfast_runner.records.run_file import RunFile
from trainfast_tui.text.format import percent_change, signed_percent, size

if TYPE_CHECKING:
    from trainfast_runner.machine.devices import Machine
    from trainfast_runner.memory.headroom import PredictedFit

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


def peak_word_of(run_file: RunFile | None) -> str:
    """Return the word for the peak of a run, also of a live one."""
    return peak_word(
        of_script=run_file is not None and run_file.script is not None,
        on_cpu=run_file is not None and run_file.device == "cpu",
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


def swap_notice(fit: PredictedFit | None, machine: Machine | None) -> str:
    """Warn of a run on a CPU that is predicted to need more memory than is free; empty if there is no risk.

    A GPU only refuses what does not fit, and so does a `memory_limit` below the free memory. A machine swaps.
    """
    available = fit.available if fit is not None else None
    if fit is None or fit.fits is not False or available is None or available.from_memory_limit:
        return ""
    if machine is None or machine.device != "cpu":
        return ""
    needed, limit = fit.needed_bytes, available.size_bytes
    return (
        f"Predicted to need {size(needed)} of {size(limit)} ({available.source}): {size(needed - limit)} too much. The"
        " machine would swap, or the kernel end a process; with memory_limit the run alone would end."
    )

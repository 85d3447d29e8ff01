"""The words for memory: its categories, the phases of a step whose peaks are measured, predictions and risks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from trainfast_runner.machine.telemetry.binding import UNIFIED_MEMORY
from trainfast_tui.text.format import percent_change, plain, signed_percent, size

if TYPE_CHECKING:
    from trainfast_runner.machine.devices import Machine
    from trainfast_runner.memory.headroom import PredictedFit
    from trainfast_runner.records.result import OomChange, OomExplanation
    from trainfast_runner.records.run_file import RunFile


CATEGORY_WORDS = {
    "params": "parameters",
    "frozen": "frozen parameters",
    "quantized": "quantized parameters",
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


ALL_FIT_TITLE = "cheapest first, the prediction says that each fits:"
MIXED_TITLE = "cheapest first; those with a predicted peak fit by the prediction:"
CLOSEST_TITLE = "no change is enough by the prediction; the closest:"
ESTIMATED_TITLE = "the cheapest knobs that free memory, by estimate:"


def oom_sentences(explanation: OomExplanation) -> Iterator[str]:
    """Yield a sentence on each known fact: the category that grew, the missing bytes, the others on the device."""
    if explanation.batch_size is not None:
        batch_words = f"batch_size {explanation.batch_size:,}"
        yield f"A search was trying {batch_words} to see whether it fits: no knob needs a change."
    if explanation.grown is not None:
        words = category_words(explanation.grown)
        grown = f" (predicted to peak at {size(explanation.grown_bytes)})" if explanation.grown_bytes else ""
        yield f"Memory ran out while the {words} were growing{grown}."
    yield from _measured(explanation)
    needed, limit = explanation.needed_bytes, explanation.limit_bytes
    if needed is not None and limit is not None:
        if needed > limit:
            too_much = size(needed - limit)
            yield f"The predicted peak, without any margin, is {size(needed)} of {size(limit)}: {too_much} too much."
        else:
            yield f"The predicted peak is {size(needed)} of {size(limit)}: it used more than predicted."
    if needed is not None and explanation.batch_size is None and not any(map(_may_fit, explanation.changes)):
        yield "No change of knobs makes it fit by the prediction."
    for advice in explanation.advice:
        yield f"Try: {advice}."
    if explanation.others:
        yield f"Others on the device: {plain('; '.join(explanation.others))}."


def _measured(explanation: OomExplanation) -> Iterator[str]:
    """Yield the sentence of the rank's own figures."""
    asked_bytes = explanation.asked_bytes
    request_words = "" if asked_bytes is None else f" and asked for {size(asked_bytes)} more"
    if explanation.held_bytes is not None:
        limit_words = f" of its {size(explanation.limit_bytes)}" if explanation.limit_bytes is not None else ""
        yield f"The failing rank held {size(explanation.held_bytes)}{limit_words}{request_words}."
    elif asked_bytes is not None and explanation.missing_bytes is not None and explanation.needed_bytes is None:
        missing = size(explanation.missing_bytes)
        yield f"The failed allocation asked for {size(asked_bytes)}, {missing} more than was free."
    elif asked_bytes is not None and explanation.advice:
        yield f"The failed allocation asked for {size(asked_bytes)}."


def change_options(change: OomChange) -> str:
    """Return the change as command-line options."""
    return " ".join(f"--set {name}={value}" for name, value in change.settings.items())


def change_words(change: OomChange) -> str:
    """Return the change as the screen writes knobs."""
    return ", ".join(f"{name} = {value}" for name, value in change.settings.items())


def effect_words(change: OomChange) -> str:
    """Return the memory that the change needs or frees, and its cost in speed if it has one."""
    return f"{change.saves}; speed: {change.costs}" if change.costs else change.saves


def _may_fit(change: OomChange) -> bool:
    """True if the change is predicted to be enough, or not predicted."""
    return change.missing_bytes is None


def changes_title(changes: Sequence[OomChange]) -> str:
    """Return the heading over the changes: how much is known about them."""
    if changes and not any(_may_fit(change) for change in changes):
        return CLOSEST_TITLE
    predicted = [change.predicted_bytes is not None for change in changes]
    return ALL_FIT_TITLE if all(predicted) else MIXED_TITLE if any(predicted) else ESTIMATED_TITLE

"""Knob changes that free memory, each with its saving and its cost in speed or in kind."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainfast_runner.memory.headroom import COMPILER_BYTES, TRAINER_BYTES
from trainfast_runner.memory.model import batch_multiple
from trainfast_runner.records.run_file import RunFile
from trainfast_runner.settings.precisions import PRECISIONS
from trainfast_runner.settings.strategy_of_run import strategy_or_single
from trainfast_runner.units import mebibytes
from trainfast_runner.worker.catalog import OPTIMIZERS

OPTIMIZER_PHASE = "optimizer"
BATCH_PHASES = ("forward", "backward")
MODEL_PHASE = "model"
MAX_PRICED = 6
"""The most changes that are priced: single ones first, combinations as far as there is room."""
Settings = dict[str, str]
"""The text of each changed knob."""
MIN_SEQ_LEN = 64
"""The shortest sequence that is proposed."""


@dataclass(frozen=True)
class KnobChange:
    """One change: `knob=value`, and in words the memory it frees and its cost."""

    knob: str
    value: str
    saves: str
    costs: str
    leaves: float = 1.0
    """About this share of the activations is left."""

    @property
    def frees_states(self) -> bool:
        """True if the change shrinks weights, gradients or optimizer states: memory that no batch decides."""
        return self.knob == "optimizer" or self.halves_weights

    @property
    def halves_weights(self) -> bool:
        """True if the change stores the weights in half precision."""
        return self.knob == "precision" and PRECISIONS[self.value].has_half_weights


def knob_changes(
    knobs: Mapping[str, Any],
    device: str,
    phase: str | None,
    largest_share: float = 1.0,
    compute_capabilities: Sequence[str] = (),
) -> list[KnobChange]:
    """Return the changes that free memory in the failed phase, the cheapest in speed or in kind first.

    Optimizers that the strategy refuses are left out, precisions that a GPU of `compute_capabilities` lacks, and
    batches that a pipeline cannot cut into its micro-batches. `largest_share` is the share of the batch above which the
    one request that failed would exceed the whole limit.
    """
    in_batch = phase in BATCH_PHASES
    every_change = _listed_changes(
        knobs,
        device,
        in_batch=in_batch,
        largest_share=largest_share if in_batch else 1.0,
        has_bf16=all(map(PRECISIONS["bf16"].runs_on, compute_capabilities)),
    )
    # While the model is built there are weights alone.
    in_phase = (change for change in every_change if phase != MODEL_PHASE or change.halves_weights)
    strategy = strategy_or_single(knobs)
    return [
        change
        for change in in_phase
        if change.knob != "optimizer" or OPTIMIZERS[change.value].refusal(strategy) is None
    ]


def knob_changes_of_run(run: RunFile, knobs: Mapping[str, Any], phase: str | None) -> list[KnobChange]:
    """Return the `knob_changes` of a run with these knobs on its devices."""
    return knob_changes(knobs, run.device, phase, compute_capabilities=run.compute_capabilities)


def changed_global_batch(share: float) -> str:
    """The cost, in words, of a global batch `share` times as large, where grad_accum cannot restore it."""
    return f"little; the global batch becomes {share:.2g} times as large"


def useful_first(changes_by_cost: Iterable[KnobChange], phase: str | None) -> list[KnobChange]:
    """Sort the changes that shrink this phase's memory to the front: the states' in the optimizer's step."""
    return sorted(changes_by_cost, key=lambda change: change.frees_states != (phase == OPTIMIZER_PHASE))


def best_of_each_knob(changes_by_cost: list[KnobChange], phase: str | None) -> list[KnobChange]:
    """Return the most useful change of each knob, a shorter sequence last, since the model then learns another task."""
    by_knob: dict[str, KnobChange] = {}
    for change in useful_first(changes_by_cost, phase):
        by_knob.setdefault(change.knob, change)
    return sorted(by_knob.values(), key=lambda change: change.knob == "seq_len")


def single_settings(changes_by_cost: Iterable[KnobChange], phase: str | None) -> list[Settings]:
    """Return the settings of each change that needs a trace of its own, the most useful first.

    A smaller batch needs none, and of the shorter sequences only the longest comes this early.
    """
    changes = [change for change in useful_first(changes_by_cost, phase) if change.knob != "batch_size"]
    longest = next((change for change in changes if change.knob == "seq_len"), None)
    return [{change.knob: change.value} for change in changes if change.knob != "seq_len" or change is longest]


def combined_settings(changes_by_cost: Iterable[KnobChange]) -> list[Settings]:
    """Return every memory-saving knob but batch and sequence at its strongest value, once with each smaller optimizer.

    The optimizer of the lowest peak depends on the model. A shorter sequence would be another task.
    """
    keeping_task = [change for change in changes_by_cost if change.knob not in ("batch_size", "seq_len")]
    strongest = {change.knob: change.value for change in keeping_task}
    optimizers = [change.value for change in reversed(keeping_task) if change.knob == "optimizer"]
    together = [{**strongest, "optimizer": value} for value in optimizers] or [strongest]
    return [settings for settings in together if len(settings) > 1]


def _listed_changes(
    knobs: Mapping[str, Any], device: str, *, in_batch: bool, largest_share: float, has_bf16: bool
) -> Iterator[KnobChange]:
    """Yield the changes, the cheapest in speed or in kind first.

    Leaving the Trainer or the compiler frees host memory only.
    """
    optimizer = OPTIMIZERS[str(knobs["optimizer"])]
    precision = PRECISIONS[str(knobs["precision"])]
    bf16_speed = "slower on most CPUs" if device == "cpu" else "faster on tensor cores (Ampere and later)"
    if knobs["attention"] == "eager":
        saves = "frees every layer's score matrices if the model supports sdpa"
        yield KnobChange("attention", "auto", saves, "faster")
    if device == "cpu" and knobs["engine"] == "trainer":
        saves = f"frees about {mebibytes(TRAINER_BYTES)} that the Trainer holds"
        yield KnobChange("engine", "native", saves, "almost none")
    if optimizer.class_name == "AdamW" and optimizer.implementation not in ("loop", "fused") and not in_batch:
        yield KnobChange("optimizer", "adamw-fused", "frees 4 bytes a parameter at the optimizer's peak", "faster")
    if device == "cpu" and knobs["compile"] != "off":
        saves = f"frees up to {mebibytes(COMPILER_BYTES)} that the compiler holds"
        yield KnobChange("compile", "off", saves, "the speed-up of compiled steps")
    batch, accumulation, multiple = int(knobs["batch_size"]), int(knobs["grad_accum"]), batch_multiple(knobs)
    if batch > multiple:
        multiples = max(1, min(batch - 1, int(batch * largest_share)) // multiple)
        smaller = multiple << (multiples.bit_length() - 1)
        share = smaller / batch
        kept_by, remainder = divmod(accumulation * batch, smaller)
        costs = changed_global_batch(share) if remainder else f"little; grad_accum={kept_by} keeps the global batch"
        yield KnobChange("batch_size", str(smaller), f"activations to {100 * share:.2g} %", costs, share)
    if not precision.computes_in_half:
        saves = "frees about half of the activations"
        if has_bf16:
            yield KnobChange("precision", "bf16", saves, bf16_speed, 0.6)
        else:
            yield KnobChange("precision", "fp16", saves, "faster on tensor cores (Volta and later)", 0.6)
    if optimizer.state_tensors >= 2 and not optimizer.eight_bit:
        yield KnobChange("optimizer", "adamw-8bit", "frees 6 bytes a parameter", "almost none")
        yield KnobChange("optimizer", "adafactor", "frees nearly 8 bytes a parameter", "slower to converge")
    if not precision.has_half_weights and has_bf16:
        costs = f"{bf16_speed}; updates lose precision"
        yield KnobChange("precision", "bf16-pure", "frees half of weights, gradients and states", costs)
    if knobs["checkpointing"] == "off":
        yield KnobChange("checkpointing", "full", "activations to one layer plus boundaries", "20-30 % slower", 0.4)
    seq_len = int(knobs["seq_len"] or 0)
    share = 0.5
    while (shorter := int(seq_len * share)) >= MIN_SEQ_LEN:
        costs = "none; the model trains on shorter sequences"
        yield KnobChange("seq_len", str(shorter), f"activations to {100 * share:.2g} %", costs, share)
        share /= 2

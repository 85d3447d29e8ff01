"""Find changes of knobs that would make a run fit that ran out of memory, or the closest ones.

`knob_changes` lists the knobs that free memory, with their costs; the memory model tells which changes are enough.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from trainfast_runner.errors import UserError
from trainfast_runner.memory.headroom import COMPILER_BYTES, TRAINER_BYTES, margin_bytes
from trainfast_runner.memory.model import MemoryModel, batch_multiple
from trainfast_runner.records.result import OomChange
from trainfast_runner.records.run_file import Prediction
from trainfast_runner.settings.knob_values import whole_number
from trainfast_runner.settings.precisions import PRECISIONS, has_capability
from trainfast_runner.settings.spec import RunSpec, strategy_or_single, with_setting
from trainfast_runner.units import compared_size, largest_fitting, mebibytes
from trainfast_runner.worker.catalog import LEVERS, OPTIMIZERS

MODEL_PHASE, BATCH_PHASES, OPTIMIZER_PHASE = "model", ("forward", "backward"), "optimizer"
MAX_CHANGES = 3
KEEPS_GLOBAL_BATCH = "the global batch stays"
MUCH_LARGER = 4
"""The largest batch that fits is proposed if it is this many times the one that keeps the global batch."""
SPARE_SHARE = 0.03
"""Share of the limit kept free: a change that only just fits by the prediction may not fit in fact."""
PROGRAM_KNOBS = ("compile", "engine")
"""Knobs that change the memory of the process beside the traced step."""
PARTLY = {"checkpointing": "every-2"}
"""A change that frees less than another of its knob: it is for where the prediction says that it is enough."""
MIN_SEQ_LEN = 64
"""The shortest sequence that is proposed."""
ModelOf = Callable[[RunSpec], MemoryModel | None]
"""Returns the memory model of a spec, None if there is none."""
Kind = tuple[object, object]
"""Family and objective of a model, None where unknown."""
Settings = dict[str, str]
"""The text of each changed knob."""


@dataclass(frozen=True, kw_only=True)
class FitTarget:
    """A run that ran out of memory, and the limit that it must fit into."""

    spec: RunSpec
    device: str
    ranks: int
    limit_bytes: int
    model_of: ModelOf
    beyond_bytes: int = 0
    """The least that the run took beyond its trace."""

    def need(self, settings: Settings) -> tuple[int, int] | None:
        """The run's predicted peak with these settings, and the bytes that must stay free beside it.

        None if a setting is refused, or without a model.
        """
        spec = spec_with(self.spec, settings)
        model_and_prediction = None if spec is None else predict_if_traced(self.model_of, spec, self.ranks)
        if spec is None or model_and_prediction is None:
            return None
        model, predicted = model_and_prediction
        total_bytes = predicted.total_bytes
        free_bytes = margin_bytes(model, spec, self.ranks, predicted) if self.device == "cpu" else 0
        if not any(name in settings for name in PROGRAM_KNOBS):
            # The same program takes as much beyond its trace as the run did, and a little more.
            corrected_bytes = total_bytes - max(predicted.traced_bytes.values(), default=total_bytes)
            free_bytes = max(free_bytes, self.beyond_bytes - corrected_bytes) + int(SPARE_SHARE * self.limit_bytes)
        return total_bytes, free_bytes

    def priced(self, settings: Settings, costs: str) -> OomChange | None:
        """The change with its predicted and missing bytes; None without a prediction."""
        need = self.need(settings)
        if need is None:
            return None
        predicted_bytes, free_bytes = need
        saves = f"predicted peak {compared_size(predicted_bytes)} of {compared_size(self.limit_bytes)}"
        missing_bytes = sum(need) - self.limit_bytes
        change = OomChange(settings=settings, saves=saves, costs=costs, predicted_bytes=predicted_bytes)
        if missing_bytes <= 0:
            return change
        kept = f"{compared_size(free_bytes)} kept free for prediction error"
        saves += f", {compared_size(missing_bytes)} over with {kept}"
        return msgspec.structs.replace(change, saves=saves, missing_bytes=missing_bytes)

    def with_smaller_batch(self, settings: Settings, costs: str) -> list[OomChange]:
        """The settings with the largest batch that fits while accumulation keeps the global batch.

        Without other settings the largest of all if that is MUCH_LARGER. Empty if no smaller batch fits.
        """
        knobs = self.spec.knobs
        batch, accumulation = whole_number(knobs, "batch_size"), whole_number(knobs, "grad_accum")
        samples, multiple = batch * accumulation, batch_multiple(knobs)

        def fits(smaller: int) -> bool:
            need = self.need({**settings, "batch_size": str(smaller)})
            return need is not None and sum(need) <= self.limit_bytes

        largest = largest_fitting(fits, batch - 1, multiple)
        proposals = [
            ({"batch_size": str(size), "grad_accum": str(samples // size), **settings}, KEEPS_GLOBAL_BATCH)
            for size in range(largest, largest // MUCH_LARGER, -multiple)
            if samples % size == 0
        ]
        if largest and not settings:
            loss = f"the global batch goes from {samples} to {largest * accumulation} a rank"
            proposals.append(({"batch_size": str(largest)}, loss))
        changes = (self.priced(proposal, f"{costs}; {words}") for proposal, words in proposals)
        return [change for change in changes if change is not None and is_enough(change)][:1]


def beyond_bytes(limit_bytes: int, predicted: Prediction | None, phase: str | None, *, in_first_step: bool) -> int:
    """The least that a run which ran out of memory in `phase` took beyond its trace: it needed more than the limit."""
    if predicted is None or phase not in (*BATCH_PHASES, OPTIMIZER_PHASE):
        return 0
    peak = OPTIMIZER_PHASE if phase == OPTIMIZER_PHASE else "forward_backward"
    expected_bytes = predicted.traced_bytes.get(peak, predicted.total_bytes)
    if phase != OPTIMIZER_PHASE and in_first_step:
        # Before the first optimizer step there are no optimizer states.
        expected_bytes -= predicted.phases.get(peak, {}).get("optimizer", 0)
    return max(0, limit_bytes - expected_bytes)


def predict_if_traced(model_of: ModelOf, spec: RunSpec, ranks: int) -> tuple[MemoryModel, Prediction] | None:
    """The model and its prediction of the spec's fullest rank; None without a model, or if memory is not predicted."""
    try:
        model = model_of(spec)
        return None if model is None else (model, model.predict(spec, ranks))
    except UserError:
        return None


def best_changes(target: FitTarget, changes_by_cost: list[OomChange], phase: str | None) -> list[OomChange]:
    """Return up to MAX_CHANGES that fit, the cheapest first.

    Each changes one knob. Where none is enough, a smaller batch comes with each of them, and then all that keep the
    task (a shorter sequence does not) together. Untraced changes, which may be enough as well, follow those that are.
    If there are neither, the closest are returned, each with its missing bytes.
    """
    priced: list[OomChange] = []
    untraced: list[OomChange] = []
    for knob in dict.fromkeys(map(knob_of, changes_by_cost)):
        changes = [change for change in changes_by_cost if knob_of(change) == knob]
        if knob == "batch_size":
            priced += target.with_smaller_batch({}, "little")
            untraced += changes if target.need({"batch_size": "1"}) is None else []
            continue
        # The first of a knob that is enough, else the last one that is predicted.
        predicted: list[OomChange] = []
        for change in changes:
            if (one := target.priced(change.settings, change.costs)) is not None:
                predicted = [one]
            elif not predicted:
                untraced.append(change)
            if any(map(is_enough, predicted)):
                break
        priced += predicted
    if not any(map(is_enough, priced)):
        priced += [pair for change in priced for pair in target.with_smaller_batch(change.settings, change.costs)]
    settings = combined_settings(changes_by_cost)
    if settings and not any(is_enough(change) and "seq_len" not in change.settings for change in priced):
        costs = "; ".join(one.costs for one in changes_by_cost if one.settings.items() <= settings.items())
        together = target.priced(settings, costs)
        if together is not None:
            priced += ([] if is_enough(together) else target.with_smaller_batch(settings, costs)) or [together]
    estimates = best_of_each_knob(untraced, phase)
    closest = sorted(priced, key=lambda change: change.predicted_bytes or 0)
    return ([*filter(is_enough, priced), *estimates] or closest)[:MAX_CHANGES]


def spec_with(spec: RunSpec, settings: Settings) -> RunSpec | None:
    """The spec with these settings; None if one is refused."""
    try:
        for name, value in settings.items():
            spec = with_setting(spec, f"{name}={value}")
    except UserError:
        return None
    return spec


def is_enough(change: OomChange) -> bool:
    """True if by the memory model the run fits with the change."""
    return change.predicted_bytes is not None and change.missing_bytes is None


def knob_of(change: OomChange) -> str:
    """The knob of a change of one."""
    return next(iter(change.settings))


def frees_states(change: OomChange) -> bool:
    """True if the change shrinks weights, gradients or optimizer states: memory that no batch decides."""
    return "optimizer" in change.settings or halves_weights(change)


def halves_weights(change: OomChange) -> bool:
    """True if the change stores the weights in half precision."""
    return "precision" in change.settings and PRECISIONS[change.settings["precision"]].has_half_weights


def knob_changes(
    knobs: Mapping[str, Any],
    device: str,
    phase: str | None,
    capabilities: Sequence[str] = (),
    kind: Kind = (None, None),
) -> list[OomChange]:
    """Return the changes of one knob that free memory in the failed phase, the cheapest in speed or in kind first.

    Optimizers and levers that the strategy refuses are left out, precisions that a GPU of `capabilities` lacks, and
    `loss=chunked` unless the model's `kind` is known to have it.
    Leaving the Trainer or the compiler frees host memory only.
    """
    on_cpu, strategy = device == "cpu", strategy_or_single(knobs)
    optimizer, precision = OPTIMIZERS[str(knobs["optimizer"])], PRECISIONS[str(knobs["precision"])]
    has_bf16 = all(has_capability(one, PRECISIONS["bf16"].min_compute_capability) for one in capabilities)
    bf16_speed = "slower on most CPUs" if on_cpu else "faster on tensor cores (Ampere and later)"
    half, half_speed = ("bf16", bf16_speed) if has_bf16 else ("fp16", "faster on tensor cores (Volta and later)")
    is_foreach = optimizer.class_name == "AdamW" and optimizer.implementation not in ("loop", "fused")
    fuses = is_foreach and phase not in BATCH_PHASES
    shrinks = optimizer.state_tensors >= 2 and optimizer.state_bytes is None
    halves = not precision.has_half_weights and has_bf16
    compiles, by_trainer = knobs["compile"] != "off", knobs["engine"] == "trainer"
    recomputes, pure_costs = knobs["checkpointing"] in ("full", "offload"), f"{bf16_speed}; updates lose precision"
    seq_len, other_task = int(knobs["seq_len"] or 0), "none; the model trains on shorter sequences"
    halvings = range(1, (seq_len // MIN_SEQ_LEN).bit_length())
    chunked, every = LEVERS["loss"]["chunked"], LEVERS["checkpointing"]["every-2"]
    chunks = knobs["loss"] == "full" and knobs["engine"] in chunked.engines and strategy.name in chunked.strategies
    chunks = chunks and kind[0] in chunked.families and kind[1] in chunked.objectives
    every_other = knobs["checkpointing"] == "off" and strategy.name in every.strategies
    one_product = "little: one more product with the vocabulary"
    table: list[tuple[bool, str, str, str, str]] = [
        (knobs["attention"] == "eager", "attention", "auto", "frees all score matrices, by sdpa", "faster"),
        (on_cpu and by_trainer, "engine", "native", f"frees about {mebibytes(TRAINER_BYTES)}", "almost none"),
        (fuses, "optimizer", "adamw-fused", "frees 4 bytes a parameter at the optimizer's peak", "faster"),
        (on_cpu and compiles, "compile", "off", f"frees up to {mebibytes(COMPILER_BYTES)}", "slower steps"),
        *((True, "batch_size", *words) for words in _smaller_batches(knobs)),
        (not precision.computes_in_half, "precision", half, "frees about half of the activations", half_speed),
        (chunks, "loss", "chunked", "frees seven eighths of the logits", one_product),
        (shrinks, "optimizer", "adamw-8bit", "frees 6 bytes a parameter", "almost none"),
        (shrinks, "optimizer", "adafactor", "frees nearly 8 bytes a parameter", "slower to converge"),
        (halves, "precision", "bf16-pure", "frees half of weights, gradients and states", pure_costs),
        (every_other, "checkpointing", "every-2", "about half of what full frees", "half of full's slowdown"),
        (not recomputes, "checkpointing", "full", "activations to one layer plus boundaries", "20-30 % slower"),
        *((True, "seq_len", f"{seq_len >> n}", f"activations to {100 / 2**n:.2g} %", other_task) for n in halvings),
    ]
    changes = [
        OomChange(settings={knob: value}, saves=saves, costs=costs)
        for applies, knob, value, saves, costs in table
        if applies and (knob != "optimizer" or OPTIMIZERS[value].refusal(strategy) is None)
    ]
    # While the model is built there are weights alone.
    return [change for change in changes if phase != MODEL_PHASE or halves_weights(change)]


def defragmenting(knobs: Mapping[str, Any], device: str, sizes: Mapping[str, int]) -> list[OomChange]:
    """Return `allocator=expandable` if by the error's `sizes` enough memory for the request lay reserved in pieces."""
    pieces_bytes = sizes.get("reserved", 0)
    if device == "cpu" or knobs.get("allocator") != "default" or pieces_bytes < sizes.get("asked", pieces_bytes + 1):
        return []
    saves = f"{mebibytes(pieces_bytes)} were reserved in pieces, and {mebibytes(sizes['asked'])} asked for"
    return [OomChange(settings={"allocator": "expandable"}, saves=saves, costs="almost none; slower while it grows")]


def _smaller_batches(knobs: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield the value, savings and costs of a batch brought down to a power of two of a pipeline's parts."""
    batch, multiple = whole_number(knobs, "batch_size"), batch_multiple(knobs)
    if batch > multiple:
        smaller = multiple << (max(1, (batch - 1) // multiple).bit_length() - 1)
        kept_by = accumulation_that_keeps(knobs, smaller)
        costs = changed_global_batch(smaller / batch)
        if kept_by is not None:
            costs = f"little; grad_accum={kept_by} keeps the global batch"
        yield str(smaller), f"activations to {100 * smaller / batch:.2g} %", costs


def accumulation_that_keeps(knobs: Mapping[str, Any], batch_size: int) -> int | None:
    """The accumulation that keeps the global batch with another batch size; None if none does."""
    accumulation, remainder = divmod(whole_number(knobs, "batch_size") * whole_number(knobs, "grad_accum"), batch_size)
    return None if remainder else accumulation


def changed_global_batch(share: float) -> str:
    """The cost, in words, of a global batch `share` times as large, where grad_accum cannot restore it."""
    return f"little; the global batch becomes {share:.2g} times as large"


def useful_first(changes_by_cost: Iterable[OomChange], phase: str | None) -> list[OomChange]:
    """Sort the changes that shrink this phase's memory to the front: the states' in the optimizer's step."""
    return sorted(changes_by_cost, key=lambda change: frees_states(change) != (phase == OPTIMIZER_PHASE))


def best_of_each_knob(changes_by_cost: Iterable[OomChange], phase: str | None) -> list[OomChange]:
    """Return the most useful change of each knob, a shorter sequence last, since the model then learns another task."""
    by_knob: dict[str, OomChange] = {}
    for change in useful_first(changes_by_cost, phase):
        if change.settings != PARTLY:
            by_knob.setdefault(knob_of(change), change)
    return sorted(by_knob.values(), key=lambda change: "seq_len" in change.settings)


def settings_to_trace(changes_by_cost: Sequence[OomChange], phase: str | None) -> list[Settings]:
    """Return the settings that need traces, the most useful first: the run's own, each change, and all together.

    A smaller batch needs none. The shorter sequences come last.
    """
    changes = [change.settings for change in useful_first(changes_by_cost, phase)]
    shorter = [settings for settings in changes if "seq_len" in settings]
    same_task = [settings for settings in changes if not {"batch_size", "seq_len"} & settings.keys()]
    return [{}, *same_task, combined_settings(changes_by_cost), *shorter]


def combined_settings(changes_by_cost: Iterable[OomChange]) -> Settings:
    """Return every memory-saving knob at its strongest value; empty without several.

    A smaller batch is added where it is needed, and a shorter sequence would be another task.
    """
    together: Settings = {}
    for change in changes_by_cost:
        if knob_of(change) not in ("batch_size", "seq_len"):
            together |= change.settings
    return together if len(together) > 1 else {}

"""Find changes of knobs that would make a run fit that ran out of memory, or the closest ones.

`knob_changes` lists the knobs that free memory, with their costs; the memory model tells which changes are enough.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainfast_runner.errors import UserError
from trainfast_runner.memory.headroom import COMPILER_BYTES, TRAINER_BYTES, margin_bytes
from trainfast_runner.memory.model import MemoryModel, Prediction, batch_multiple
from trainfast_runner.records.result import OomChange
from trainfast_runner.settings.knob_values import whole_number
from trainfast_runner.settings.precisions import PRECISIONS
from trainfast_runner.settings.spec import RunSpec, strategy_or_single, with_setting
from trainfast_runner.units import compared_size, largest_fitting, mebibytes
from trainfast_runner.worker.catalog import OPTIMIZERS

MODEL_PHASE, BATCH_PHASES, OPTIMIZER_PHASE = "model", ("forward", "backward"), "optimizer"
MAX_CHANGES = 3
KEEPS_GLOBAL_BATCH = "the global batch stays"
MUCH_LARGER = 4
"""The largest batch that fits is proposed if it is this many times the one that keeps the global batch."""
SPARE_SHARE = 0.03
"""Share of the limit kept free: a change that only just fits by the prediction may not fit in fact."""
PROGRAM_KNOBS = ("compile", "engine")
"""Knobs that change the memory of the process beside the traced step."""
MIN_SEQ_LEN = 64
"""The shortest sequence that is proposed."""
ModelOf = Callable[[RunSpec], MemoryModel | None]
"""Returns the memory model of a spec, None if there is none."""
Settings = dict[str, str]
"""The text of each changed knob."""


@dataclass(frozen=True, kw_only=True)
class FitTarget:
    """A run that ran out of memory, and the limit that it must fit into."""

    spec: RunSpec
    device: str
    ranks: int
    limit_bytes: int
    phase: str | None
    """The phase in which memory ran out."""
    model_of: ModelOf
    beyond_bytes: int = 0
    """The least that the run took beyond its trace."""

    @property
    def batch(self) -> tuple[int, int]:
        """Batch size and accumulation."""
        return whole_number(self.spec.knobs, "batch_size"), whole_number(self.spec.knobs, "grad_accum")

    def need(self, settings: Settings) -> tuple[Prediction, int] | None:
        """The run's prediction with these settings, and the bytes that must stay free beside it.

        None if a setting is refused, or without a model.
        """
        spec = spec_with(self.spec, settings)
        model_and_prediction = None if spec is None else predict_if_traced(self.model_of, spec, self.ranks)
        if spec is None or model_and_prediction is None:
            return None
        model, predicted = model_and_prediction
        free_bytes = margin_bytes(model, spec, self.ranks, predicted) if self.device == "cpu" else 0
        if not any(name in settings for name in PROGRAM_KNOBS):
            # The same program takes as much beyond its trace as the run did, and a little more.
            corrected_bytes = predicted.total_bytes - max(
                predicted.traced_bytes.values(), default=predicted.total_bytes
            )
            free_bytes = max(free_bytes, self.beyond_bytes - corrected_bytes) + int(SPARE_SHARE * self.limit_bytes)
        return predicted, free_bytes

    def change(self, settings: Settings, costs: str) -> OomChange | None:
        """The change with its predicted and missing bytes; None without a prediction."""
        need = self.need(settings)
        if need is None:
            return None
        predicted, free_bytes = need
        saves = f"predicted peak {compared_size(predicted.total_bytes)} of {compared_size(self.limit_bytes)}"
        missing_bytes = predicted.total_bytes + free_bytes - self.limit_bytes
        if missing_bytes > 0:
            kept = f"{compared_size(free_bytes)} kept free for prediction error"
            saves += f", {compared_size(missing_bytes)} over with {kept}"
        return OomChange(
            settings=settings,
            saves=saves,
            costs=costs,
            predicted_bytes=predicted.total_bytes,
            missing_bytes=missing_bytes if missing_bytes > 0 else None,
        )

    def largest_batch(self, settings: Settings) -> int:
        """The largest smaller batch that fits with these settings; 0 if there is none, or no prediction."""

        def fits(batch: int) -> bool:
            need = self.need({**settings, "batch_size": str(batch)})
            return need is not None and sum((need[0].total_bytes, need[1])) <= self.limit_bytes

        return largest_fitting(fits, self.batch[0] - 1, batch_multiple(self.spec.knobs))


def beyond_bytes(limit_bytes: int, predicted: Prediction | None, phase: str | None, *, in_first_step: bool) -> int:
    """The least that a run which ran out of memory in `phase` took beyond its trace: it needed more than the limit."""
    if predicted is None or phase not in (*BATCH_PHASES, OPTIMIZER_PHASE):
        return 0
    if phase == OPTIMIZER_PHASE:
        return max(0, limit_bytes - predicted.traced_bytes.get("optimizer", predicted.total_bytes))
    expected_bytes = predicted.traced_bytes.get("forward_backward", predicted.total_bytes)
    # Before the first optimizer step there are no optimizer states.
    states_bytes = predicted.phases.get("forward_backward", {}).get("optimizer", 0) if in_first_step else 0
    return max(0, limit_bytes - (expected_bytes - states_bytes))


def predict_if_traced(model_of: ModelOf, spec: RunSpec, ranks: int) -> tuple[MemoryModel, Prediction] | None:
    """The model and its prediction of the spec's fullest rank; None without a model, or if memory is not predicted."""
    try:
        model = model_of(spec)
        return None if model is None else (model, model.predict(spec, ranks))
    except UserError:
        return None


def best_changes(target: FitTarget, changes_by_cost: list[KnobChange]) -> list[OomChange]:
    """Return up to MAX_CHANGES that fit, the cheapest first.

    Each changes one knob. Where none is enough, a smaller batch comes with each of them, and then all that keep the
    task (a shorter sequence does not) together. Untraced changes, which may be enough as well, follow those that are.
    If there are neither, the closest are returned, each with its missing bytes.
    """
    priced: list[OomChange] = []
    untraced: list[KnobChange] = []
    for knob in dict.fromkeys(change.knob for change in changes_by_cost):
        values = [change for change in changes_by_cost if change.knob == knob]
        if knob == "batch_size":
            priced += _smaller_batch(target, {}, "little")
            untraced += values if target.need({"batch_size": "1"}) is None else []
        else:
            priced += _first_enough(target, values, untraced)
    if not any(map(is_enough, priced)):
        priced += [pair for change in priced for pair in _smaller_batch(target, change.settings, change.costs)]
    settings = combined_settings(changes_by_cost)
    if settings and not any(is_enough(change) and "seq_len" not in change.settings for change in priced):
        costs = "; ".join(one.costs for one in changes_by_cost if settings.get(one.knob) == one.value)
        together = target.change(settings, costs)
        if together is not None:
            priced += ([] if is_enough(together) else _smaller_batch(target, settings, costs)) or [together]
    estimates = [unpredicted_change(change) for change in best_of_each_knob(untraced, target.phase)]
    closest = sorted(priced, key=lambda change: change.predicted_bytes or 0)
    return ([*filter(is_enough, priced), *estimates] or closest)[:MAX_CHANGES]


def _first_enough(target: FitTarget, values: list[KnobChange], untraced: list[KnobChange]) -> list[OomChange]:
    """The first change of one knob that is enough, else the last one predicted; `untraced` gets those before."""
    predicted: list[OomChange] = []
    for knob_change in values:
        change = target.change({knob_change.knob: knob_change.value}, knob_change.costs)
        if change is not None:
            predicted = [change]
            if is_enough(change):
                break
        elif not predicted:
            untraced.append(knob_change)
    return predicted


def _smaller_batch(target: FitTarget, settings: Settings, costs: str) -> list[OomChange]:
    """The settings with the largest batch that fits while accumulation keeps the global batch.

    Without other settings the largest of all if that is MUCH_LARGER. Empty if no smaller batch fits.
    """
    batch, accumulation = target.batch
    samples, largest = batch * accumulation, target.largest_batch(settings)
    for smaller in range(largest, largest // MUCH_LARGER, -batch_multiple(target.spec.knobs)):
        if samples % smaller == 0:
            batch_knobs = {"batch_size": str(smaller), "grad_accum": str(samples // smaller)}
            change = target.change({**batch_knobs, **settings}, f"{costs}; {KEEPS_GLOBAL_BATCH}")
            if change is not None and is_enough(change):
                return [change]
    if settings or not largest:
        return []
    costs = f"{costs}; the global batch goes from {samples} to {largest * accumulation} a rank"
    change = target.change({"batch_size": str(largest)}, costs)
    return [change] if change is not None and is_enough(change) else []


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


def unpredicted_change(knob_change: KnobChange) -> OomChange:
    """The change in words, without a prediction."""
    return OomChange(settings=knob_change.settings, saves=knob_change.saves, costs=knob_change.costs)


@dataclass(frozen=True)
class KnobChange:
    """One change: `knob=value`, and in words the memory it frees and its cost."""

    knob: str
    value: str
    saves: str
    costs: str
    grad_accum: str | None = None
    """The accumulation that keeps the global batch; None for another knob than the batch, or if none does."""

    @property
    def settings(self) -> Settings:
        """The changed knob."""
        return {self.knob: self.value}

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
    compute_capabilities: Sequence[str] = (),
    largest_share: float = 1.0,
) -> list[KnobChange]:
    """Return the changes that free memory in the failed phase, the cheapest in speed or in kind first.

    Optimizers that the strategy refuses are left out, and precisions that a GPU of `compute_capabilities` lacks.
    `largest_share` is the share of the batch above which the one request that failed would exceed the whole limit.
    Leaving the Trainer or the compiler frees host memory only.
    """
    on_cpu, strategy = device == "cpu", strategy_or_single(knobs)
    optimizer, precision = OPTIMIZERS[str(knobs["optimizer"])], PRECISIONS[str(knobs["precision"])]
    has_bf16 = all(map(PRECISIONS["bf16"].runs_on, compute_capabilities))
    bf16_speed = "slower on most CPUs" if on_cpu else "faster on tensor cores (Ampere and later)"
    half, speed = ("bf16", bf16_speed) if has_bf16 else ("fp16", "faster on tensor cores (Volta and later)")
    fuses = optimizer.class_name == "AdamW" and optimizer.implementation not in ("loop", "fused")
    shrinks = optimizer.state_tensors >= 2 and not optimizer.eight_bit
    halves = not precision.has_half_weights and has_bf16
    compiler = mebibytes(COMPILER_BYTES)
    leaves_trainer = KnobChange("engine", "native", f"frees about {mebibytes(TRAINER_BYTES)}", "almost none")
    fused = KnobChange("optimizer", "adamw-fused", "frees 4 bytes a parameter at the optimizer's peak", "faster")
    to_one_layer = "activations to one layer plus boundaries"
    pure_costs = f"{bf16_speed}; updates lose precision"
    before_batch = [
        (knobs["attention"] == "eager", KnobChange("attention", "auto", "frees all score matrices, by sdpa", "faster")),
        (on_cpu and knobs["engine"] == "trainer", leaves_trainer),
        (fuses and phase not in BATCH_PHASES, fused),
        (on_cpu and knobs["compile"] != "off", KnobChange("compile", "off", f"frees up to {compiler}", "slower steps")),
    ]
    after_batch = [
        (not precision.computes_in_half, KnobChange("precision", half, "frees about half of the activations", speed)),
        (shrinks, KnobChange("optimizer", "adamw-8bit", "frees 6 bytes a parameter", "almost none")),
        (shrinks, KnobChange("optimizer", "adafactor", "frees nearly 8 bytes a parameter", "slower to converge")),
        (halves, KnobChange("precision", "bf16-pure", "frees half of weights, gradients and states", pure_costs)),
        (knobs["checkpointing"] == "off", KnobChange("checkpointing", "full", to_one_layer, "20-30 % slower")),
    ]
    changes = [
        *(change for applies, change in before_batch if applies),
        *_smaller_batches(knobs, largest_share if phase in BATCH_PHASES else 1.0),
        *(change for applies, change in after_batch if applies),
        *_shorter_sequences(knobs),
    ]
    return [
        change
        for change in changes
        # While the model is built there are weights alone.
        if (phase != MODEL_PHASE or change.halves_weights)
        and (change.knob != "optimizer" or OPTIMIZERS[change.value].refusal(strategy) is None)
    ]


def _smaller_batches(knobs: Mapping[str, Any], largest_share: float) -> Iterator[KnobChange]:
    """Yield the batch brought down to a power of two of what a pipeline cuts into its micro-batches."""
    batch, multiple = whole_number(knobs, "batch_size"), batch_multiple(knobs)
    if batch <= multiple:
        return
    multiples = max(1, min(batch - 1, int(batch * largest_share)) // multiple)
    smaller = multiple << (multiples.bit_length() - 1)
    kept_by, remainder = divmod(batch * whole_number(knobs, "grad_accum"), smaller)
    saves = f"activations to {100 * smaller / batch:.2g} %"
    costs, keeps = changed_global_batch(smaller / batch), None
    if not remainder:
        costs, keeps = f"little; grad_accum={kept_by} keeps the global batch", str(kept_by)
    yield KnobChange("batch_size", str(smaller), saves, costs, keeps)


def _shorter_sequences(knobs: Mapping[str, Any]) -> Iterator[KnobChange]:
    """Yield half of the sequence, a quarter, and so on."""
    seq_len = int(knobs["seq_len"] or 0)
    share = 0.5
    while (shorter := int(seq_len * share)) >= MIN_SEQ_LEN:
        costs = "none; the model trains on shorter sequences"
        yield KnobChange("seq_len", str(shorter), f"activations to {100 * share:.2g} %", costs)
        share /= 2


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


def settings_to_trace(changes_by_cost: Sequence[KnobChange], phase: str | None) -> list[Settings]:
    """Return the settings that need traces, the most useful first: the run's own, each change, and all together.

    A smaller batch needs none. The shorter sequences come last.
    """
    changes = [change for change in useful_first(changes_by_cost, phase) if change.knob != "batch_size"]
    same_task = [change.settings for change in changes if change.knob != "seq_len"]
    shorter = [change.settings for change in changes if change.knob == "seq_len"]
    return [{}, *same_task, combined_settings(changes_by_cost), *shorter]


def combined_settings(changes_by_cost: Iterable[KnobChange]) -> Settings:
    """Return every memory-saving knob at its strongest value; empty without several.

    A smaller batch is added where it is needed, and a shorter sequence would be another task.
    """
    together = {change.knob: change.value for change in changes_by_cost if change.knob not in ("batch_size", "seq_len")}
    return together if len(together) > 1 else {}

"""Find changes of knobs that would make a run fit that ran out of memory, or the closest ones.

`knob_changes` lists the knobs that free memory, with their costs; the memory model tells which changes are enough.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

from trainfast_runner.bisection import largest_fitting
from trainfast_runner.errors import UserError
from trainfast_runner.memory.headroom import margin_bytes
from trainfast_runner.memory.model import MemoryModel, batch_multiple
from trainfast_runner.memory.oom.knob_changes import (
    BATCH_PHASES,
    MAX_PRICED,
    OPTIMIZER_PHASE,
    KnobChange,
    Settings,
    best_of_each_knob,
    combined_settings,
    knob_changes,
)
from trainfast_runner.memory.prediction import Prediction
from trainfast_runner.records.result import OomChange
from trainfast_runner.settings.knob_type import whole_number
from trainfast_runner.settings.spec import RunSpec, with_setting
from trainfast_runner.units import compared_size

MAX_CHANGES = 3
KEEPS_GLOBAL_BATCH = "the global batch stays"
MUCH_LARGER = 1.5
"""The largest batch that fits is named if it is this many times the batch that keeps the global one."""
SPARE_SHARE = 0.03
"""Share of the limit kept free: a change that only just fits by the prediction may not fit in fact."""
NEGLIGIBLE_SHARE = 0.1
"""Share of the limit under which all weights and states together are not the reason that a run ran out of memory."""
PROGRAM_KNOBS = ("compile", "engine")
"""Knobs that change the memory of the process beside the traced step."""
ModelOf = Callable[[RunSpec], MemoryModel | None]


@dataclass(frozen=True)
class MemoryNeed:
    """A prediction, and the bytes that must stay free beside it."""

    prediction: Prediction
    margin_bytes: int

    @property
    def total_bytes(self) -> int:
        """Bytes of both together."""
        return self.prediction.total_bytes + self.margin_bytes


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
    """Returns the memory model of a spec, None if there is none."""
    untouched_bytes: int = 0
    """Bytes that the limit counts beyond the held memory."""
    beyond_bytes: int = 0
    """The least that the run took beyond its trace."""
    asked_bytes: float | None = None
    """The request that failed."""
    compute_capabilities: tuple[str, ...] = ()

    @property
    def applicable_changes(self) -> list[KnobChange]:
        """The changes that free memory in its phase, the cheapest first."""
        largest_share = self.limit_bytes / self.asked_bytes if self.asked_bytes else 1.0
        return knob_changes(self.spec.knobs, self.device, self.phase, largest_share, self.compute_capabilities)

    @property
    def batch(self) -> tuple[int, int]:
        """Batch size and accumulation."""
        return whole_number(self.spec.knobs, "batch_size"), whole_number(self.spec.knobs, "grad_accum")

    def need(self, settings: Settings) -> MemoryNeed | None:
        """The run's need with these settings; None if one is refused, or without a model."""
        spec = spec_with(self.spec, settings)
        model_and_prediction = None if spec is None else predict_if_traced(self.model_of, spec, self.ranks)
        if spec is None or model_and_prediction is None:
            return None
        model, predicted = model_and_prediction
        needed_margin_bytes = margin_bytes(model, spec, self.ranks, predicted) if self.device == "cpu" else 0
        needed_margin_bytes = max(needed_margin_bytes, self.untouched_bytes)
        if any(name in settings for name in PROGRAM_KNOBS):
            return MemoryNeed(predicted, needed_margin_bytes)
        # The same program takes as much beyond its trace as the run did, and a little more.
        corrected_bytes = predicted.total_bytes - max(predicted.traced_bytes.values(), default=predicted.total_bytes)
        return MemoryNeed(
            predicted,
            max(needed_margin_bytes, self.beyond_bytes - corrected_bytes) + int(SPARE_SHARE * self.limit_bytes),
        )

    def change(self, settings: Settings, costs: str) -> OomChange | None:
        """The change with its predicted and missing bytes; None without a prediction."""
        need = self.need(settings)
        if need is None:
            return None
        predicted = need.prediction
        saves = f"predicted peak {compared_size(predicted.total_bytes)} of {compared_size(self.limit_bytes)}"
        missing_bytes = need.total_bytes - self.limit_bytes
        if missing_bytes > 0:
            saves += f", {compared_size(missing_bytes)} over"
            saves += f" with {compared_size(need.margin_bytes)} kept free for prediction error"
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
            return need is not None and need.total_bytes <= self.limit_bytes

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


def best_changes(target: FitTarget) -> list[OomChange]:
    """Return up to MAX_CHANGES that fit, of one knob or several, the cheapest first.

    Changes that are enough by the model come before untraced ones, which are one of each knob. If there are neither,
    the closest are returned, each with its missing bytes.
    """
    changes_by_cost = _changes_that_matter(target)
    priced: list[OomChange] = []
    untraced: list[KnobChange] = []
    for knob in dict.fromkeys(change.knob for change in changes_by_cost):
        values = [change for change in changes_by_cost if change.knob == knob]
        if knob == "batch_size":
            priced += _batch_changes(target)
            untraced += values if target.need({"batch_size": "1"}) is None else []
        else:
            priced += _first_enough(target, values, untraced)
    for change in islice(_combinations(target, changes_by_cost, priced), max(0, MAX_PRICED - len(priced))):
        priced.append(change)
    # Untraced changes may be enough as well: they follow the ones known to be.
    unpredicted = [unpredicted_change(change, target) for change in best_of_each_knob(untraced, target.phase)]
    closest = sorted(priced, key=lambda change: change.predicted_bytes or 0)
    return ([*filter(is_enough, priced), *unpredicted] or closest)[:MAX_CHANGES]


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


def _combinations(target: FitTarget, changes_by_cost: list[KnobChange], priced: list[OomChange]) -> Iterator[OomChange]:
    """Yield the changes of several knobs that are worth their cost beside the `priced` ones, the cheapest first.

    A change that is not enough alone comes with a smaller batch if that leaves the batch larger than it would be alone.
    All knobs come together unless a change that keeps the task, which a shorter sequence does not, is enough.
    """
    alone = list(priced)
    if sum(map(is_enough, alone)) < MAX_CHANGES:
        largest_alone = max(map(_batch_in, filter(is_enough, alone)), default=0)
        for change in alone:
            if not is_enough(change):
                smaller = _with_smaller_batch(target, change.settings, change.costs)
                yield from (pair for pair in smaller if _batch_in(pair) > largest_alone)
    for settings in combined_settings(changes_by_cost):
        if any(is_enough(change) and "seq_len" not in change.settings for change in priced):
            return
        costs = "; ".join(change.costs for change in changes_by_cost if settings.get(change.knob) == change.value)
        together = target.change(settings, costs)
        if together is not None:
            smaller = [] if is_enough(together) else _with_smaller_batch(target, settings, costs)
            yield from smaller or [together]


def _changes_that_matter(target: FitTarget) -> list[KnobChange]:
    """The knob changes; before the optimizer's step without those of weights and states too small to matter."""
    base = target.need({}) if target.phase in BATCH_PHASES else None
    if base is None:
        return target.applicable_changes
    states_bytes = base.prediction.params_bytes + base.prediction.grads_bytes + base.prediction.optimizer_bytes
    states_matter = states_bytes >= NEGLIGIBLE_SHARE * target.limit_bytes
    return [knob_change for knob_change in target.applicable_changes if states_matter or not knob_change.frees_states]


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


def unpredicted_change(knob_change: KnobChange, target: FitTarget | None = None) -> OomChange:
    """The change in words, without a prediction; with a doubt if the run's own prediction leaves little hope."""
    base, saves = None if target is None else target.need({}), knob_change.saves
    if target is not None and base is not None and knob_change.leaves < 1:
        freed_bytes = (1 - knob_change.leaves) * base.prediction.activations_bytes
        saves += "; probably not enough alone" if base.prediction.total_bytes - freed_bytes > target.limit_bytes else ""
    return OomChange(settings={knob_change.knob: knob_change.value}, saves=saves, costs=knob_change.costs)


def _batch_in(change: OomChange) -> int:
    return int(change.settings.get("batch_size", 0))


def _batch_changes(target: FitTarget) -> list[OomChange]:
    """The largest batch that keeps the global batch; and the largest that fits, if the other is much smaller."""
    keeping = _with_smaller_batch(target, {}, "little")
    batch, accumulation = target.batch
    largest_batch = target.largest_batch({})
    if largest_batch < MUCH_LARGER * max([1, *map(_batch_in, keeping)]):
        return keeping
    costs = f"little; the global batch goes from {batch * accumulation} to {largest_batch * accumulation} a rank"
    largest = target.change({"batch_size": str(largest_batch)}, costs)
    return [*keeping, *([largest] if largest is not None and is_enough(largest) else [])]


def _with_smaller_batch(target: FitTarget, settings: Settings, costs: str) -> list[OomChange]:
    """The settings with the largest batch that fits and divides the global batch, which accumulation keeps."""
    batch, accumulation = target.batch
    for smaller in range(target.largest_batch(settings), 0, -batch_multiple(target.spec.knobs)):
        if batch * accumulation % smaller == 0:
            batch_knobs = {"batch_size": str(smaller), "grad_accum": str(batch * accumulation // smaller)}
            change = target.change({**batch_knobs, **settings}, f"{costs}; {KEEPS_GLOBAL_BATCH}")
            if change is not None and is_enough(change):
                return [change]
    return []

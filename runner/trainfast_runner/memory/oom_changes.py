"""Find changes of knobs that would make a run fit that ran out of memory, or the closest ones.

`oom_advice` knows the knobs that free memory and their costs; here the memory model tells which of them are enough.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations, islice

import msgspec

from trainfast_runner.errors import UserError
from trainfast_runner.memory.fitting import margin_bytes
from trainfast_runner.memory.model import MemoryModel
from trainfast_runner.memory.oom_advice import BATCH_PHASES, OPTIMIZER_PHASE, Fix, cheapest, cost_of
from trainfast_runner.memory.prediction import Prediction
from trainfast_runner.records.result import OomChange
from trainfast_runner.settings.spec import RunSpec, with_setting
from trainfast_runner.units import gibibytes, mebibytes

MOST_CHANGES = 3
KEEPS = "the global batch stays"
MUCH = 1.5
"""The largest batch that fits is named if it is this many times the batch that keeps the global one."""
LEAST_SEQ_LEN = 64
"""No shorter sequence is proposed."""
SPARE_SHARE = 0.03
"""Share of the limit kept free: a change that only just fits by the prediction may not fit in fact."""
PROGRAM = ("compile", "engine")
"""Knobs that change the memory of the process beside the traced step."""
ModelOf = Callable[[RunSpec], MemoryModel | None]


@dataclass(frozen=True)
class OomMargin:
    """Bytes a change must leave free beside its prediction, learnt from the end of `spec`.

    `beyond_bytes` is the least that the run took beyond its trace; `untouched_bytes` is what its limit counted beyond
    the memory held.
    """

    spec: RunSpec
    device: str
    limit_bytes: int
    untouched_bytes: int = 0
    beyond_bytes: int = 0

    def of(self, model: MemoryModel, spec: RunSpec, ranks: int, predicted: Prediction) -> int:
        """Bytes that must stay free beside the prediction of another spec.

        Another spec of the same program takes as much beyond its trace as this run, and a little more.
        """
        besides = margin_bytes(model, spec, ranks, predicted) if self.device == "cpu" else 0
        besides = max(besides, self.untouched_bytes)
        if any(spec.knobs[name] != self.spec.knobs[name] for name in PROGRAM):
            return besides
        corrected = predicted.total_bytes - max(predicted.traced_bytes.values(), default=predicted.total_bytes)
        return max(besides, self.beyond_bytes - corrected) + int(SPARE_SHARE * self.limit_bytes)


def margin_of(
    spec: RunSpec,
    device: str,
    limit_bytes: int,
    predicted: Prediction | None,
    phase: str | None,
    untouched_bytes: int | None,
    in_first_step: bool,
) -> OomMargin:
    """Learn the margin from a run that ran out of memory in `phase`: it needed more than the limit."""
    beyond = 0
    if predicted is not None and phase in (*BATCH_PHASES, OPTIMIZER_PHASE):
        beyond = max(0, limit_bytes - _expected(predicted, phase, in_first_step))
    return OomMargin(spec, device, limit_bytes, untouched_bytes or 0, beyond)


def _expected(predicted: Prediction, phase: str | None, in_first_step: bool) -> int:
    """The traced peak by then: before the first optimizer step there are no optimizer states."""
    if phase == OPTIMIZER_PHASE:
        return predicted.traced_bytes.get("optimizer", predicted.total_bytes)
    expected = predicted.traced_bytes.get("forward_backward", predicted.total_bytes)
    states = predicted.phases.get("forward_backward", {}).get("optimizer", 0) if in_first_step else 0
    return expected - states


@dataclass(frozen=True)
class Wanted:
    """The goal of a change: bring `spec` on `ranks` under the limit, with its margin.

    `model_of` returns the memory model of a spec, None if there is none.
    """

    spec: RunSpec
    ranks: int
    margin: OomMargin
    model_of: ModelOf

    def turned(self, settings: dict[str, str]) -> Wanted | None:
        """The same goal for the spec with these settings; None if they exclude each other."""
        changed = _with(self.spec, settings)
        return None if changed is None else replace(self, spec=changed)

    def needs(self, batch_size: int | None = None) -> tuple[Prediction, int] | None:
        """The prediction (with another batch) and the bytes that must stay free beside it; None if there is none."""
        spec = self.spec
        if batch_size is not None:
            spec = replace(spec, knobs={**spec.knobs, "batch_size": batch_size})
        try:
            model = self.model_of(spec)
            if model is None:
                return None
            found = model.predict(spec, self.ranks)
            return found, self.margin.of(model, spec, self.ranks, found)
        except UserError:
            return None

    def fits(self, batch_size: int) -> bool:
        """True if a batch of this size is predicted to fit."""
        needs = self.needs(batch_size)
        return needs is not None and needs[0].total_bytes + needs[1] <= self.margin.limit_bytes

    def change(self, settings: dict[str, str], costs: str) -> OomChange | None:
        """The change with its predicted and missing bytes; None without a model of it."""
        changed = self.turned(settings)
        needs = None if changed is None else changed.needs()
        if needs is None:
            return None
        found, besides = needs
        limit = self.margin.limit_bytes
        words = f"needs {_size(found.total_bytes)} of {_size(limit)}"
        missing = found.total_bytes + besides - limit
        if missing > 0:
            words += (
                f", {_size(missing)} too much beside the {_size(besides)} that a run may take beyond its prediction"
            )
        return OomChange(
            settings=settings,
            saves=words,
            costs=costs,
            predicted_bytes=found.total_bytes,
            missing_bytes=missing if missing > 0 else None,
        )


def changes(wanted: Wanted, fixes: list[Fix]) -> list[OomChange]:
    """Return up to MOST_CHANGES of these fixes and combinations of them, the cheapest first.

    Changes that are enough by the model come before untraced ones. If there are neither, the closest are returned, each
    with its missing bytes.
    """
    enough: list[OomChange] = []
    close: list[OomChange] = []
    unknown: list[Fix] = []
    short: list[Fix] = []
    for fix in sorted(fixes, key=cost_of):
        found, is_known = _by_one(wanted, fix)
        enough += (change for change in found if is_enough(change))
        close += (change for change in found if not is_enough(change))
        if not is_known:
            unknown.append(fix)
        elif fix.knob != "batch_size" and not any(map(is_enough, found)):
            short.append(fix)
    if len(enough) < MOST_CHANGES:
        together = [*(fix for fix in fixes if fix.knob == "batch_size"), *short]
        alone = max((int(change.settings.get("batch_size", 0)) for change in enough), default=0)
        # Beside a smaller batch another change is worth its cost only where the batch then is larger.
        pairs = list(_pairs(wanted, together))
        worth = (one for one in pairs if is_enough(one) and not 0 < int(one.settings.get("batch_size", 0)) <= alone)
        enough += islice(worth, MOST_CHANGES - len(enough))
        close += (pair for pair in pairs if not is_enough(pair))
    if all("seq_len" in change.settings for change in enough):
        # A shorter sequence is another task.
        everything = _all_together(wanted, fixes)
        if not enough and not any(map(is_enough, everything)):
            everything += _shorter_together(wanted, fixes)
        enough += (change for change in everything if is_enough(change))
        close += (change for change in everything if not is_enough(change))
    # Untraced changes may be enough as well: they follow the ones known to be.
    found = [*enough, *(unpredicted(fix) for fix in fixes if fix in unknown)][:MOST_CHANGES]
    return found or sorted(close, key=lambda change: change.predicted_bytes or 0)[:MOST_CHANGES]


def is_enough(change: OomChange) -> bool:
    """True if by the memory model the run fits with the change."""
    return change.predicted_bytes is not None and change.missing_bytes is None


def unpredicted(fix: Fix) -> OomChange:
    """The change with an estimate instead of a prediction."""
    return OomChange(settings={fix.knob: fix.value}, saves=fix.saves, costs=fix.costs)


def predict(model_of: ModelOf, spec: RunSpec, ranks: int) -> Prediction | None:
    """Predict the spec's fullest rank; None without a model, or if its memory is not predicted."""
    try:
        model = model_of(spec)
        return None if model is None else model.predict(spec, ranks)
    except UserError:
        return None


def candidates(spec: RunSpec, device: str, phase: str | None = None) -> list[RunSpec]:
    """Return the specs of all single changes, each worth a trace."""
    singles = [{fix.knob: fix.value} for fix in _turned(spec, device, phase)]
    return _specs(spec, singles)


def combined(spec: RunSpec, device: str, phase: str | None = None) -> list[RunSpec]:
    """Return the specs of several changes at once, the strongest first, worth a trace if no single change is enough."""
    fixes = _turned(spec, device, phase)
    shorter = [{fix.knob: value} for fix in fixes if fix.knob == "seq_len" for value in _halves(fix)[1:]]
    pairs = [{one.knob: one.value, other.knob: other.value} for one, other in _different(fixes)]
    strongest = _strongest(fixes)
    last = [{**strongest[0], **one} for one in shorter]
    return _specs(spec, [*strongest, *shorter, *pairs, *last])


def _turned(spec: RunSpec, device: str, phase: str | None) -> list[Fix]:
    """Every change but a smaller batch, whose memory needs no trace of its own."""
    return [fix for fix in cheapest(spec.knobs, device, phase, most=None) if fix.knob != "batch_size"]


def _specs(spec: RunSpec, settings: list[dict[str, str]]) -> list[RunSpec]:
    found: list[RunSpec] = []
    for one in settings:
        changed = _with(spec, one)
        if changed is not None and changed != spec and changed not in found:
            found.append(changed)
    return found


def _different(fixes: Iterable[Fix]) -> Iterator[tuple[Fix, Fix]]:
    return ((one, other) for one, other in combinations(fixes, 2) if one.knob != other.knob)


def _halves(fix: Fix) -> list[str]:
    """The shorter sequence and its halves down to the shortest proposed."""
    values = [int(fix.value)]
    while values[-1] // 2 >= LEAST_SEQ_LEN:
        values.append(values[-1] // 2)
    return [str(value) for value in values]


def _strongest(fixes: Iterable[Fix]) -> list[dict[str, str]]:
    """Every knob but batch and sequence turned as far as it goes, once with each smaller optimizer.

    The optimizer of the lowest peak depends on the model. A shorter sequence would be another task.
    """
    ordered = sorted((fix for fix in fixes if fix.knob not in ("batch_size", "seq_len")), key=cost_of)
    others = {fix.knob: fix.value for fix in ordered if fix.knob != "optimizer"}
    optimizers = [{fix.knob: fix.value} for fix in reversed(ordered) if fix.knob == "optimizer"] or [{}]
    return [{**others, **optimizer} for optimizer in optimizers]


def _by_one(wanted: Wanted, fix: Fix) -> tuple[list[OomChange], bool]:
    """The predicted change, and True if there is a model of it. A sequence is halved until it fits."""
    if fix.knob == "batch_size":
        keeping, is_known = _smaller_batch(wanted)
        return [*keeping, *_largest_batch(wanted, keeping)], is_known
    found: OomChange | None = None
    for value in _halves(fix) if fix.knob == "seq_len" else [fix.value]:
        further = wanted.change({fix.knob: value}, fix.costs)
        if further is None:
            break
        found = further
        if is_enough(found):
            break
    return [] if found is None else [found], found is not None


def _smaller_batch(wanted: Wanted) -> tuple[list[OomChange], bool]:
    """The largest batch that fits and divides the global batch, which accumulation keeps; True if there is a model."""
    batch, accumulation = _batch_of(wanted.spec)
    most = _most(wanted)
    if most is None:
        return [], False
    for smaller in range(min(most, batch - 1), 0, -1):
        if batch * accumulation % smaller:
            continue
        settings = {"batch_size": str(smaller), "grad_accum": str(batch * accumulation // smaller)}
        found = wanted.change(settings, f"little; {KEEPS}")
        if found is not None and is_enough(found):
            return [found], True
    return [], True


def _most(wanted: Wanted) -> int | None:
    """The largest smaller batch that fits; None without a prediction."""
    if wanted.needs(1) is None:
        return None
    low, high = 0, _batch_of(wanted.spec)[0]
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if wanted.fits(middle) else (low, middle)
    return low


def _largest_batch(wanted: Wanted, keeping: list[OomChange]) -> list[OomChange]:
    """The largest batch that fits, if the one that keeps the global batch (in `keeping`) is much smaller."""
    batch, accumulation = _batch_of(wanted.spec)
    most = min(_most(wanted) or 0, batch - 1)
    kept = max((int(change.settings["batch_size"]) for change in keeping), default=0)
    if most < MUCH * max(1, kept):
        return []
    costs = f"little; the global batch goes from {batch * accumulation} to {most * accumulation} a rank"
    found = wanted.change({"batch_size": str(most)}, costs)
    return [] if found is None or not is_enough(found) else [found]


def _batch_of(spec: RunSpec) -> tuple[int, int]:
    """Batch size and accumulation."""
    return int(str(spec.knobs["batch_size"])), int(str(spec.knobs["grad_accum"]))


def _pairs(wanted: Wanted, fixes: list[Fix]) -> Iterator[OomChange]:
    """Yield two changes together, each not enough alone, or with a smaller batch."""
    for one, other in _different(fixes):
        if "batch_size" in (one.knob, other.knob):
            with_it = other if one.knob == "batch_size" else one
            yield from _with_smaller_batch(wanted, {with_it.knob: with_it.value}, with_it.costs)
        else:
            settings = {one.knob: one.value, other.knob: other.value}
            found = wanted.change(settings, f"{one.costs}; {other.costs}")
            if found is not None:
                yield found


def _with_smaller_batch(wanted: Wanted, settings: dict[str, str], costs: str) -> list[OomChange]:
    """These settings with the largest batch that fits."""
    turned = wanted.turned(settings)
    found, _ = ([], False) if turned is None else _smaller_batch(turned)
    return [
        msgspec.structs.replace(one, settings={**one.settings, **settings}, costs=f"{costs}; {KEEPS}") for one in found
    ]


def _all_together(wanted: Wanted, fixes: list[Fix]) -> list[OomChange]:
    """Every knob but the sequence turned as far as it goes, with the largest batch that fits."""
    found: list[OomChange] = []
    for settings in _strongest(fixes):
        costs = "; ".join(fix.costs for fix in fixes if settings.get(fix.knob) == fix.value)
        together = wanted.change(settings, costs) if len(settings) > 1 else None
        if together is None:
            continue
        smaller = [] if is_enough(together) else _with_smaller_batch(wanted, settings, costs)
        found += smaller or [together]
    return found


def _shorter_together(wanted: Wanted, fixes: list[Fix]) -> list[OomChange]:
    """Every knob turned as far as it goes, with the longest sequence that fits, else the shortest."""
    found: list[OomChange] = []
    settings = next(iter(_strongest(fixes)), {})
    shorter = [(fix, value) for fix in fixes if fix.knob == "seq_len" for value in _halves(fix)[1:]]
    for fix, value in shorter:
        further = wanted.change({**settings, fix.knob: value}, f"every knob that frees memory; {fix.costs}")
        found = found if further is None else [further]
        if any(map(is_enough, found)):
            break
    return found


def _with(spec: RunSpec, settings: dict[str, str]) -> RunSpec | None:
    try:
        for name, value in settings.items():
            spec = with_setting(spec, f"{name}={value}")
    except UserError:
        return None
    return spec


def _size(size: int) -> str:
    return gibibytes(size) if size >= 10 * 2**30 else mebibytes(size)

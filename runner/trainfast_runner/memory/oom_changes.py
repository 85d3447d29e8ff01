"""Which changes of knobs would make a run fit that died of memory; where none does, which come closest.

`oom_advice` knows which knobs free memory and what each costs; here the memory model says which of them are enough.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations, islice

import msgspec

from trainfast_runner.errors import UserError
from trainfast_runner.memory.model import MemoryModel
from trainfast_runner.memory.oom_advice import Fix, cheapest, cost_of
from trainfast_runner.memory.oom_margin import OomMargin
from trainfast_runner.memory.prediction import Prediction
from trainfast_runner.records.result import OomChange
from trainfast_runner.settings.spec import RunSpec, with_setting
from trainfast_runner.units import gibibytes, mebibytes

MOST_CHANGES = 3
KEEPS = "the global batch stays"
MUCH = 1.5
"""So many times as large as the batch that keeps the global one, the largest that fits is worth naming."""
LEAST_SEQ_LEN = 64
"""No shorter sequence is proposed."""
ModelOf = Callable[[RunSpec], MemoryModel | None]


@dataclass(frozen=True)
class Wanted:
    """What a change is asked to do: bring `spec` on `ranks` under the limit that memory ended at, with its margin.

    `model_of` gives the memory model of a spec, None where there is none.
    """

    spec: RunSpec
    ranks: int
    margin: OomMargin
    model_of: ModelOf

    def turned(self, settings: dict[str, str]) -> Wanted | None:
        """The same of the spec with these settings; None where they cannot stand together."""
        changed = _with(self.spec, settings)
        return None if changed is None else replace(self, spec=changed)

    def needs(self, batch_size: int | None = None) -> tuple[Prediction, int] | None:
        """What is predicted (with another batch), and what has to stay free beside it; None where nothing is."""
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
        """Whether a batch of this size is predicted to fit."""
        needs = self.needs(batch_size)
        return needs is not None and needs[0].total_bytes + needs[1] <= self.margin.limit_bytes

    def change(self, settings: dict[str, str], costs: str) -> OomChange | None:
        """The change as the model sees it, with what it still misses; None without a model of it."""
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
    """Up to MOST_CHANGES out of these fixes and several of them at once, the cheapest first.

    Those that are enough by the model stand before those that nothing is known of. Where none of either is left, the
    closest are given, each with what it still misses.
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
    # What has not been traced may do as well, but nothing says so: it stands after what is known to.
    found = [*enough, *(unpredicted(fix) for fix in fixes if fix in unknown)][:MOST_CHANGES]
    return found or sorted(close, key=lambda change: change.predicted_bytes or 0)[:MOST_CHANGES]


def is_enough(change: OomChange) -> bool:
    """Whether the memory model says that the run fits with it."""
    return change.predicted_bytes is not None and change.missing_bytes is None


def unpredicted(fix: Fix) -> OomChange:
    """The change where there is nothing but an estimate."""
    return OomChange(settings={fix.knob: fix.value}, saves=fix.saves, costs=fix.costs)


def predict(model_of: ModelOf, spec: RunSpec, ranks: int) -> Prediction | None:
    """What the spec needs on its fullest rank; None without a model, or where its memory is not predicted."""
    try:
        model = model_of(spec)
        return None if model is None else model.predict(spec, ranks)
    except UserError:
        return None


def candidates(spec: RunSpec, device: str, phase: str | None = None) -> list[RunSpec]:
    """The specs whose memory models tell which changes are enough; a trace of each is worth having."""
    singles = [{fix.knob: fix.value} for fix in _turned(spec, device, phase)]
    return _specs(spec, singles)


def combined(spec: RunSpec, device: str, phase: str | None = None) -> list[RunSpec]:
    """The specs of several changes at once, and of a knob turned further, worth a trace where no single change is
    enough: the strongest first."""
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
    """The value of a shorter sequence, and its halves down to the shortest proposed."""
    values = [int(fix.value)]
    while values[-1] // 2 >= LEAST_SEQ_LEN:
        values.append(values[-1] // 2)
    return [str(value) for value in values]


def _strongest(fixes: Iterable[Fix]) -> list[dict[str, str]]:
    """Every knob but the batch turned as far as it goes, with each optimizer that takes less: which one of them leads
    to the lowest peak depends on the model. A shorter sequence would be another task."""
    ordered = sorted((fix for fix in fixes if fix.knob not in ("batch_size", "seq_len")), key=cost_of)
    others = {fix.knob: fix.value for fix in ordered if fix.knob != "optimizer"}
    optimizers = [{fix.knob: fix.value} for fix in reversed(ordered) if fix.knob == "optimizer"] or [{}]
    return [{**others, **optimizer} for optimizer in optimizers]


def _by_one(wanted: Wanted, fix: Fix) -> tuple[list[OomChange], bool]:
    """The change as far as it is known, and whether there is a model to say so. A sequence is halved until it fits."""
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
    """The largest batch that fits and divides the global batch, which accumulation then keeps."""
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
    """The largest smaller batch that fits; None without a model, and for a strategy whose memory is not predicted."""
    if wanted.needs(1) is None:
        return None
    low, high = 0, _batch_of(wanted.spec)[0]
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if wanted.fits(middle) else (low, middle)
    return low


def _largest_batch(wanted: Wanted, keeping: list[OomChange]) -> list[OomChange]:
    """The largest batch that fits, where the one that keeps the global batch (in `keeping`) is much smaller."""
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
    """Two changes together, of those of which none but a smaller batch is enough alone."""
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
    """These settings and as small a batch as they still need."""
    turned = wanted.turned(settings)
    found, _ = ([], False) if turned is None else _smaller_batch(turned)
    return [
        msgspec.structs.replace(one, settings={**one.settings, **settings}, costs=f"{costs}; {KEEPS}") for one in found
    ]


def _all_together(wanted: Wanted, fixes: list[Fix]) -> list[OomChange]:
    """Every knob but the sequence turned as far as it goes, and the batch as far down as that still needs."""
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
    """Every knob turned as far as it goes, with the longest sequence that then fits, or else the shortest known of."""
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

"""Why memory ran out, as far as records and the memory model tell, and which changes would make the run fit.

`oom_advice` knows which knobs free memory and what each costs; here the memory model says which of them are enough.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from itertools import combinations, islice

import msgspec

from trainfast_runner.byte_words import gibibytes, mebibytes
from trainfast_runner.memory_model import MemoryModel, Prediction
from trainfast_runner.outcome.oom_advice import MODEL_PHASE, OPTIMIZER_PHASE, UNITS, Fix, bytes_after, cheapest, cost_of
from trainfast_runner.problem import Problem
from trainfast_runner.run_directory.records import Event, RunFile
from trainfast_runner.run_directory.result import OomChange, OomExplanation, RunError
from trainfast_runner.settings.knob_values import parse_bytes_per_rank
from trainfast_runner.settings.spec import RunSpec, of_record, with_setting

MOST_CHANGES = 3
KEEPS = "the global batch stays"
SPARE = 0.97
"""Of the limit: a change that only just fits by the prediction may not fit in fact."""
BEYOND_BYTES = 32 << 20
"""What a run on a CPU takes beyond its prediction as its limit counts it: 9 to 25 MiB at the least in runs of one small
model (4 layers, 50 MiB) that ended early: buffers of libraries, and address space that is not touched."""
MUCH = 1.5
"""So many times as large as the batch that keeps the global one, the largest that fits is worth naming."""
GROWS = {
    MODEL_PHASE: ("params",),
    "forward": ("activations", "temporary"),
    "backward": ("activations", "grads", "temporary", "communication"),
    OPTIMIZER_PHASE: ("optimizer", "temporary", "communication"),
}
"""What grows in each phase; the rest stands there from before. The first is what grows most as a rule."""
ModelOf = Callable[[RunSpec], MemoryModel | None]


def explain(
    run: RunFile,
    error: RunError | None,
    reason: str,
    model_of: ModelOf,
    *,
    events: Iterable[Event] = (),
    parameters: dict[str, object] | None = None,
    held_bytes: int | None = None,
) -> OomExplanation:
    """What is to be said of a run that died of memory. `held_bytes` is what the rank says it held by then.

    `model_of` gives the memory model of a spec, or None where it has not been traced; it may raise Problem where there
    can be none. `parameters` are the worker's
    sizes of the model (`parameters`, `layers`, ...), for the estimates that stand in where there is no model.
    """
    spec = of_record(run)
    phase = error.phase if error is not None else None
    said = reason or (error.message if error is not None else None) or ""
    limit = _limit(run, error, said)
    prediction = _predict(model_of, spec, run.world_size)
    grown, grown_bytes = _grown(prediction, phase)
    needed = _needed(run, prediction)
    asked = bytes_after("allocate", said)
    untouched = _untouched(run, limit, held_bytes, asked)
    return OomExplanation(
        phase=phase,
        rank=error.rank if error is not None else None,
        grown=grown,
        grown_bytes=grown_bytes,
        held_bytes=held_bytes,
        untouched_bytes=untouched,
        asked_bytes=None if asked is None else int(asked),
        needed_bytes=needed,
        limit_bytes=limit,
        missing_bytes=_missing(needed, limit, said, held_bytes),
        others=list(_others(run, events, said)),
        changes=_changes(
            spec,
            run,
            phase,
            said,
            limit,
            _to_stay_under(limit, needed, untouched),
            model_of,
            parameters or {},
        ),
        basis=prediction.basis if prediction is not None else "",
    )


def candidates(spec: RunSpec, device: str, phase: str | None = None) -> list[RunSpec]:
    """The specs whose memory models tell which changes are enough; a trace of each is worth having."""
    singles = [{fix.knob: fix.value} for fix in _turned(spec, device, phase)]
    return _specs(spec, singles)


def combined(spec: RunSpec, device: str, phase: str | None = None) -> list[RunSpec]:
    """The specs of several changes at once, worth a trace where no single one is enough: the strongest first."""
    fixes = _turned(spec, device, phase)
    pairs = [{one.knob: one.value, other.knob: other.value} for one, other in _different(fixes)]
    return _specs(spec, [*_strongest(fixes), *pairs])


def _turned(spec: RunSpec, device: str, phase: str | None) -> list[Fix]:
    """Every change but a smaller batch, whose memory needs no trace of its own."""
    return [fix for fix in cheapest(spec.knobs, device, phase, most=None) if fix.knob != "batch_size"]


def _specs(spec: RunSpec, changes: list[dict[str, str]]) -> list[RunSpec]:
    found: list[RunSpec] = []
    for settings in changes:
        changed = _with(spec, settings)
        if changed is not None and changed != spec and changed not in found:
            found.append(changed)
    return found


def _different(fixes: Iterable[Fix]) -> Iterator[tuple[Fix, Fix]]:
    return ((one, other) for one, other in combinations(fixes, 2) if one.knob != other.knob)


def _strongest(fixes: Iterable[Fix]) -> list[dict[str, str]]:
    """Every knob but the batch turned as far as it goes, with each optimizer that takes less: which one of them leads
    to the lowest peak depends on the model. A shorter sequence would be another task."""
    ordered = sorted((fix for fix in fixes if fix.knob not in ("batch_size", "seq_len")), key=cost_of)
    others = {fix.knob: fix.value for fix in ordered if fix.knob != "optimizer"}
    optimizers = [{fix.knob: fix.value} for fix in reversed(ordered) if fix.knob == "optimizer"] or [{}]
    return [{**others, **optimizer} for optimizer in optimizers]


def _limit(run: RunFile, error: RunError | None, said: str) -> int | None:
    """What the allocator of the rank that died could have had: its limit, or on a GPU what the error says."""
    if run.memory_limit_bytes:
        rank = (error.rank if error is not None else None) or 0
        return run.memory_limit_bytes[min(rank, len(run.memory_limit_bytes) - 1)]
    if isinstance(run.knobs.get("memory_limit"), str):
        return min(parse_bytes_per_rank(run.knobs["memory_limit"]))
    # torch's own sentence: "... of which X is free. ... Y is allocated by PyTorch, and Z is reserved by PyTorch but".
    free, allocated = bytes_after("of which", said), _bytes_before("is allocated by PyTorch", said)
    if free is None or allocated is None:
        return None
    return int(free + allocated + (_bytes_before("is reserved by PyTorch but unallocated", said) or 0))


def _needed(run: RunFile, prediction: Prediction | None) -> int | None:
    """What was predicted of the run when it began, as everything else on record of it says; else what is by now."""
    if run.predicted_bytes is not None:
        return run.predicted_bytes
    return prediction.total_bytes if prediction is not None else None


def _untouched(run: RunFile, limit: int | None, held: int | None, asked: float | None) -> int | None:
    """What the limit of a CPU counted beyond the memory held, at the least: stacks and blocks reserved, not touched.

    RLIMIT_DATA refuses what would take the address space beyond it, so all but the request was in use.
    """
    if run.device != "cpu" or limit is None or held is None or asked is None:
        return None
    return max(0, int(limit - held - asked))


def _to_stay_under(limit: int | None, needed: int | None, untouched: int | None) -> int | None:
    """What a change has to come under to be called enough: a little less than the limit, and than what just failed.

    What the run took beyond its prediction, or its limit counted beyond its memory, another one takes as well.
    """
    if limit is None:
        return None
    beyond = max(0 if untouched is None else max(untouched, BEYOND_BYTES), limit - needed if needed is not None else 0)
    return int(SPARE * limit - beyond)


def _missing(needed: int | None, limit: int | None, said: str, held: int | None) -> int | None:
    """Of what the run needs by the prediction; else, at the least, of what was asked for when memory ended."""
    if needed is not None and limit is not None and needed > limit:
        return needed - limit
    asked = bytes_after("allocate", said)
    free = bytes_after("of which", said)
    if free is None and limit is not None and held is not None:
        free = float(limit - held)
    return int(asked - free) if asked is not None and free is not None and asked > free else None


def _grown(prediction: Prediction | None, phase: str | None) -> tuple[str | None, int | None]:
    """The category that grows most in this phase, and its bytes at the phase's predicted peak."""
    grows = GROWS.get(phase or "")
    if grows is None:
        return None, None
    if prediction is None:
        return grows[0], None
    at = prediction.phases.get("optimizer" if phase == OPTIMIZER_PHASE else "forward_backward", {})
    sizes = {name: at.get(name, 0) for name in grows}
    grown = max(sizes, key=lambda name: sizes[name])
    return grown, sizes[grown]


def _others(run: RunFile, events: Iterable[Event], said: str) -> Iterator[str]:
    """Who else held memory of the device, from the error's own words, the start of the run, and its events."""
    named: set[int] = set()
    for pid, size, unit in re.findall(r"Process (\d+) has (\d[\d.]*) (KiB|MiB|GiB) memory in use", said):
        named.add(int(pid))
        yield f"process {pid} held {size} {unit}"
    for process in run.foreign_processes:
        pid, used = process.get("pid"), process.get("memory_used_bytes")
        if isinstance(pid, int) and pid not in named:
            named.add(pid)
            size = mebibytes(used) if isinstance(used, int) else "memory"
            yield f"process {pid} held {size} from the start"
    for event in events:
        if event.kind == "foreign_process" and event.state == "appeared" and event.pid not in named:
            yield event.detail or f"process {event.pid} appeared"


def _changes(
    spec: RunSpec,
    run: RunFile,
    phase: str | None,
    said: str,
    limit: int | None,
    under: int | None,
    model_of: ModelOf,
    parameters: dict[str, object],
) -> list[OomChange]:
    fixes = cheapest(spec.knobs, run.device, phase, said, limit, parameters, most=None)
    if limit is None or under is None:
        return [_unpredicted(fix) for fix in fixes[:MOST_CHANGES]]
    proved: list[OomChange] = []
    unknown: list[Fix] = []
    short: list[Fix] = []
    for fix in sorted(fixes, key=cost_of):
        changes, is_known = _enough(spec, fix, run.world_size, limit, under, model_of)
        proved += changes
        if not is_known:
            unknown.append(fix)
        elif not changes and fix.knob != "batch_size":
            short.append(fix)
    if len(proved) < MOST_CHANGES:
        together = [*(fix for fix in fixes if fix.knob == "batch_size"), *short]
        alone = max((int(change.settings.get("batch_size", 0)) for change in proved), default=0)
        pairs = _pairs(spec, together, run.world_size, limit, under, model_of)
        # Beside a smaller batch another change is worth its cost only where the batch then is larger.
        worth = (pair for pair in pairs if not 0 < int(pair.settings.get("batch_size", 0)) <= alone)
        proved += islice(worth, MOST_CHANGES - len(proved))
    if not proved:
        proved = _all_together(spec, fixes, run.world_size, limit, under, model_of)
    # What has not been traced may do as well, but nothing says so: it stands after what is known to.
    return [*proved, *(_unpredicted(fix) for fix in fixes if fix in unknown)][:MOST_CHANGES]


def _enough(
    spec: RunSpec, fix: Fix, ranks: int, limit: int, under: int, model_of: ModelOf
) -> tuple[list[OomChange], bool]:
    """The change where the model says it is enough, and whether there is a model to say so."""
    if fix.knob == "batch_size":
        found_batch, is_known = _smaller_batch(spec, ranks, limit, under, model_of)
        return [*found_batch, *_largest_batch(spec, ranks, limit, under, model_of, found_batch)], is_known
    changed = _with(spec, {fix.knob: fix.value})
    found = None if changed is None else _predict(model_of, changed, ranks)
    if found is None:
        return [], False
    if found.total_bytes > under:
        return [], True
    return [_predicted({fix.knob: fix.value}, fix.costs, found, limit)], True


def _smaller_batch(
    spec: RunSpec, ranks: int, limit: int, under: int, model_of: ModelOf
) -> tuple[list[OomChange], bool]:
    """The largest batch that fits and divides the global batch, which accumulation then keeps."""
    batch, accumulation = int(str(spec.knobs["batch_size"])), int(str(spec.knobs["grad_accum"]))
    most = _most(spec, ranks, under, model_of)
    if most is None:
        return [], False
    for smaller in range(min(most, batch - 1), 0, -1):
        if batch * accumulation % smaller:
            continue
        settings = {"batch_size": str(smaller), "grad_accum": str(batch * accumulation // smaller)}
        changed = _with(spec, settings)
        found = None if changed is None else _predict(model_of, changed, ranks)
        if found is not None and found.total_bytes <= under:
            return [_predicted(settings, f"little; {KEEPS}", found, limit)], True
    return [], True


def _most(spec: RunSpec, ranks: int, under: int, model_of: ModelOf) -> int | None:
    """The largest batch by the model; None without one, and for a strategy whose memory is not predicted."""
    try:
        model = model_of(spec)
        return None if model is None else model.max_batch(spec, ranks, under) or 0
    except Problem:
        return None


def _largest_batch(
    spec: RunSpec, ranks: int, limit: int, under: int, model_of: ModelOf, keeping: list[OomChange]
) -> list[OomChange]:
    """The largest batch that fits, where the one that keeps the global batch (in `keeping`) is much smaller."""
    batch, accumulation = int(str(spec.knobs["batch_size"])), int(str(spec.knobs["grad_accum"]))
    most = min(_most(spec, ranks, under, model_of) or 0, batch - 1)
    kept = max((int(change.settings["batch_size"]) for change in keeping), default=0)
    if most < MUCH * max(1, kept):
        return []
    settings = {"batch_size": str(most)}
    changed = _with(spec, settings)
    found = None if changed is None else _predict(model_of, changed, ranks)
    if found is None or found.total_bytes > under:
        return []
    costs = f"little; the global batch goes from {batch * accumulation} to {most * accumulation} a rank"
    return [_predicted(settings, costs, found, limit)]


def _pairs(
    spec: RunSpec, fixes: list[Fix], ranks: int, limit: int, under: int, model_of: ModelOf
) -> Iterator[OomChange]:
    """Two changes together, of those of which none but a smaller batch is enough alone."""
    for one, other in _different(fixes):
        if "batch_size" in (one.knob, other.knob):
            with_it = other if one.knob == "batch_size" else one
            changed = _with(spec, {with_it.knob: with_it.value})
            found, _ = ([], False) if changed is None else _smaller_batch(changed, ranks, limit, under, model_of)
            for change in found:
                settings = {**change.settings, with_it.knob: with_it.value}
                yield msgspec.structs.replace(change, settings=settings, costs=f"{with_it.costs}; {KEEPS}")
            continue
        settings = {one.knob: one.value, other.knob: other.value}
        changed = _with(spec, settings)
        prediction = None if changed is None else _predict(model_of, changed, ranks)
        if prediction is not None and prediction.total_bytes <= under:
            yield _predicted(settings, f"{one.costs}; {other.costs}", prediction, limit)


def _all_together(
    spec: RunSpec, fixes: list[Fix], ranks: int, limit: int, under: int, model_of: ModelOf
) -> list[OomChange]:
    """Every knob turned as far as it goes, and the batch as far down as that still needs; none where it is no use."""
    found: list[OomChange] = []
    for settings in _strongest(fixes):
        changed = _with(spec, settings)
        prediction = None if changed is None or len(settings) < 2 else _predict(model_of, changed, ranks)
        if changed is None or prediction is None:
            continue
        costs = "; ".join(fix.costs for fix in fixes if settings.get(fix.knob) == fix.value)
        if prediction.total_bytes <= under:
            found.append(_predicted(settings, costs, prediction, limit))
            continue
        smaller, _ = _smaller_batch(changed, ranks, limit, under, model_of)
        found += [
            msgspec.structs.replace(one, settings={**one.settings, **settings}, costs=f"{costs}; {KEEPS}")
            for one in smaller
        ]
    return found


def _predicted(settings: dict[str, str], costs: str, found: Prediction, limit: int) -> OomChange:
    words = f"needs {_size(found.total_bytes)} of {_size(limit)}"
    return OomChange(settings=settings, saves=words, costs=costs, predicted_bytes=found.total_bytes)


def _unpredicted(fix: Fix) -> OomChange:
    return OomChange(settings={fix.knob: fix.value}, saves=fix.saves, costs=fix.costs)


def _predict(model_of: ModelOf, spec: RunSpec, ranks: int) -> Prediction | None:
    try:
        model = model_of(spec)
        return None if model is None else model.predict(spec, ranks)
    except Problem:
        return None


def _with(spec: RunSpec, settings: dict[str, str]) -> RunSpec | None:
    try:
        for name, value in settings.items():
            spec = with_setting(spec, f"{name}={value}")
    except Problem:
        return None
    return spec


def _bytes_before(words: str, said: str) -> float | None:
    found = re.search(rf"(\d[\d.]*) (KiB|MiB|GiB) {words}", said)
    return None if found is None else float(found[1]) * UNITS[found[2]]


def _size(size: int) -> str:
    return gibibytes(size) if size >= 10 * 2**30 else mebibytes(size)

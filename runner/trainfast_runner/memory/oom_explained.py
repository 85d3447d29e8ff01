"""Why memory ran out, as far as records and the memory model tell; `oom_changes` says what would make the run fit."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from trainfast_runner.memory.oom_advice import MODEL_PHASE, OPTIMIZER_PHASE, UNITS, bytes_after, cheapest
from trainfast_runner.memory.oom_changes import MOST_CHANGES, ModelOf, Wanted, changes, predict, unpredicted
from trainfast_runner.memory.oom_margin import margin_of
from trainfast_runner.memory.prediction import Prediction
from trainfast_runner.records.result import OomExplanation, RunError
from trainfast_runner.records.run_file import Event, RunFile
from trainfast_runner.settings.knob_values import parse_bytes_per_rank
from trainfast_runner.settings.spec import of_record
from trainfast_runner.units import mebibytes

GROWS = {
    MODEL_PHASE: ("params",),
    "forward": ("activations", "temporary"),
    "backward": ("activations", "grads", "temporary", "communication"),
    OPTIMIZER_PHASE: ("optimizer", "temporary", "communication"),
}
"""What grows in each phase; the rest stands there from before. The first is what grows most as a rule."""


def explain(
    run: RunFile,
    error: RunError | None,
    reason: str,
    model_of: ModelOf,
    *,
    events: Iterable[Event] = (),
    parameters: dict[str, object] | None = None,
    held_bytes: int | None = None,
    in_first_step: bool = False,
) -> OomExplanation:
    """What is to be said of a run that died of memory. `held_bytes` is what the rank says it held by then.

    `model_of` gives the memory model of a spec, or None where it has not been traced; it may raise UserError where
    there can be none. `parameters` are the worker's sizes of the model (`parameters`, `layers`, ...), for the
    estimates that stand in where there is no model. `in_first_step`: no step had ended.
    """
    spec = of_record(run)
    phase = error.phase if error is not None else None
    said = reason or (error.message if error is not None else None) or ""
    limit = _limit(run, error, said)
    prediction = predict(model_of, spec, run.world_size)
    grown, grown_bytes = _grown(prediction, phase)
    needed = _needed(run, prediction)
    asked = bytes_after("allocate", said)
    untouched = _untouched(run, limit, held_bytes, asked)
    fixes = cheapest(spec.knobs, run.device, phase, said, limit, parameters or {}, most=None)
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
        missing_bytes=_missing(needed, limit, said, held_bytes, is_set=bool(run.memory_limit_bytes)),
        others=list(_others(run, events, said)),
        changes=(
            [unpredicted(fix) for fix in fixes[:MOST_CHANGES]]
            if limit is None
            else changes(
                Wanted(
                    spec,
                    run.world_size,
                    margin_of(spec, run.device, limit, prediction, phase, untouched, in_first_step),
                    model_of,
                ),
                fixes,
            )
        ),
        basis=prediction.basis if prediction is not None else "",
    )


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


def _missing(needed: int | None, limit: int | None, said: str, held: int | None, *, is_set: bool) -> int | None:
    """Of what the run needs by the prediction; else, at the least, of what was asked for when memory ended.

    Under a limit that `is_set` for the run it does not matter how much the GPU has free.
    """
    if needed is not None and limit is not None and needed > limit:
        return needed - limit
    asked = bytes_after("allocate", said)
    free = None if is_set else bytes_after("of which", said)
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


def _bytes_before(words: str, said: str) -> float | None:
    found = re.search(rf"(\d[\d.]*) (KiB|MiB|GiB) {words}", said)
    return None if found is None else float(found[1]) * UNITS[found[2]]

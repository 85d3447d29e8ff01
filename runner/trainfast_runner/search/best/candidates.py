"""Enumerate the candidates of a best-fit search: the combinations of knobs with one global batch, legal or refused."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import msgspec

from trainfast_runner.errors import UserError
from trainfast_runner.machine.devices import Machine
from trainfast_runner.records.run_file import RecordedKnobs
from trainfast_runner.search.best.too_large import TOO_LARGE, excess_words
from trainfast_runner.search.candidate_spec import BATCH_KNOBS, MESH, candidate_spec
from trainfast_runner.search.journal.best import Candidate, Space
from trainfast_runner.settings.device_counts import data_parallel_degree, device_count, world_size
from trainfast_runner.settings.knob_type import KnobValues, whole_number
from trainfast_runner.settings.knob_values import KnobValue
from trainfast_runner.settings.knobs import BY_NAME
from trainfast_runner.settings.spec import RunSpec
from trainfast_runner.settings.vary import Vary, fewest_to_drop
from trainfast_runner.worker.catalog import allows_warm_trials

MOST_CANDIDATES = 5000
"""A search has at most this many candidates."""
MOST_COUNTED = 1_000_000
"""Combinations of batch, accumulation and strategy that are looked at one by one to count the candidates."""


def processes_of(spec: RunSpec, machine: Machine) -> int | None:
    """Number of processes of a run; None when the machine has too few devices."""
    try:
        return world_size(spec, machine)
    except UserError:
        return None


def enumerate_space(
    spec: RunSpec,
    machine: Machine,
    vary: Vary,
    global_batch: int | None,
    refuse: Callable[[RunSpec], UserError | None],
) -> Space:
    """Return every combination of the varied values with that global batch (None: any), the baseline among them.

    `refuse` returns the UserError of a run that cannot start. Raises UserError for more candidates than
    `MOST_CANDIDATES`, and for a global batch that nothing varied can give.
    """
    count = count_of(spec, machine, vary, global_batch)
    if count > MOST_CANDIDATES:
        raise _too_many_error(count, vary)
    arithmetic = _BatchArithmetic(spec, machine)
    base_knobs = _baseline(arithmetic, global_batch)
    derives = global_batch is not None and any(name in vary for name in (*BATCH_KNOBS, *MESH))
    others = [name for name in BATCH_KNOBS if name not in vary]
    shown = [*vary, *(name for name in others if derives or base_knobs[name] != spec.knobs[name])]
    combinations: list[RecordedKnobs] = []
    dropped = 0
    for values in itertools.product(*vary.values()):
        derived = arithmetic.derive(dict(zip(vary, values, strict=True)), set(vary), global_batch)
        if derived is None:
            dropped += 1
        else:
            combinations.append({name: derived.get(name, base_knobs[name]) for name in shown})
    if not combinations and global_batch is not None:
        raise _impossible_error(global_batch, _attainable(arithmetic, vary, global_batch))
    first = {name: base_knobs[name] for name in shown}
    if first not in combinations:
        combinations.insert(0, first)
    candidates = [_candidate(arithmetic, knobs, refuse) for knobs in combinations]
    return Space(candidates=candidates, baseline_number=combinations.index(first), dropped=dropped)


def with_predictions(space: Space, bytes_of: Mapping[int, int | None], limit_bytes: int | None) -> Space:
    """The space with the predicted bytes of these candidates (of the fullest rank), those above the limit ruled out.

    The baseline is never ruled out: its run shows the error of the prediction.
    """
    candidates = list(space.candidates)
    for number, needed in bytes_of.items():
        candidate = candidates[number]
        changed = msgspec.structs.replace(candidate, predicted_bytes=needed)
        if candidate.ruled_out is None and needed is not None and limit_bytes is not None and needed > limit_bytes:
            excess = needed - limit_bytes
            changed = msgspec.structs.replace(changed, excess_bytes=excess)
            if number != space.baseline_number:
                reason = excess_words(needed, limit_bytes)
                changed = msgspec.structs.replace(changed, ruled_out=TOO_LARGE, reason=reason)
        candidates[number] = changed
    return msgspec.structs.replace(space, candidates=candidates)


def count_of(spec: RunSpec, machine: Machine, vary: Vary, global_batch: int | None) -> int:
    """Number of combinations with that global batch, without listing them; all of them beyond `MOST_COUNTED`."""
    batch = _deciding_batch(vary)
    others = math.prod(len(values) for name, values in vary.items() if name not in batch)
    looked_at = math.prod(map(len, batch.values()))
    if global_batch is None or looked_at > MOST_COUNTED or others > MOST_CANDIDATES:
        return others * looked_at
    arithmetic = _BatchArithmetic(spec, machine)
    possible = sum(
        arithmetic.derive(dict(zip(batch, values, strict=True)), set(vary), global_batch) is not None
        for values in itertools.product(*batch.values())
    )
    return others * possible


def occurring(spec: RunSpec, machine: Machine, vary: Vary, global_batch: int) -> dict[str, list[KnobValue]]:
    """`vary` without the values that no combination of that global batch has."""
    batch = _deciding_batch(vary)
    arithmetic = _BatchArithmetic(spec, machine)
    combinations = (dict(zip(batch, values, strict=True)) for values in itertools.product(*batch.values()))
    possible = [knobs for knobs in combinations if arithmetic.derive(knobs, set(vary), global_batch) is not None]
    return {
        name: [value for value in values if name not in batch or any(knobs[name] == value for knobs in possible)]
        for name, values in vary.items()
    }


def changes_training(candidate: Candidate, baseline: Candidate) -> list[str]:
    """The knobs by which a candidate trains differently from the baseline; empty if it trains the same."""
    changed = [
        name
        for name, value in candidate.knobs.items()
        if name in BY_NAME and not BY_NAME[name].keeps_training(baseline.knobs[name], value)
    ]
    return [*changed, *(["global batch"] if candidate.samples_per_step != baseline.samples_per_step else [])]


def default_global_batch(spec: RunSpec, machine: Machine) -> int:
    """Samples of one optimizer step of the preset. Raises UserError when there are too few devices."""
    preset_spec = candidate_spec(spec, {})
    batch, accumulation = (whole_number(preset_spec.knobs, name) for name in BATCH_KNOBS)
    return batch * accumulation * data_parallel_degree(preset_spec.knobs, device_count(preset_spec, machine))


def _deciding_batch(vary: Vary) -> Vary:
    """The varied knobs that decide which global batch a combination has."""
    return {name: values for name, values in vary.items() if name in (*BATCH_KNOBS, *MESH)}


class _BatchArithmetic:
    """Arithmetic of the global batch: batch_size x grad_accum x the ranks that a strategy shares it out to."""

    def __init__(self, spec: RunSpec, machine: Machine) -> None:
        self.spec, self.machine = spec, machine
        self._degrees: dict[tuple[KnobValue, ...], int] = {}

    def degree(self, knobs: Mapping[str, KnobValue]) -> int:
        """The data-parallel degree with these knobs; 1 where the devices do not suffice, which is refused later."""
        key = tuple(knobs.get(name, self.spec.knobs[name]) for name in MESH)
        if key not in self._degrees:
            run_spec = candidate_spec(self.spec, dict(zip(MESH, key, strict=True)))
            try:
                self._degrees[key] = data_parallel_degree(run_spec.knobs, device_count(run_spec, self.machine))
            except UserError:
                self._degrees[key] = 1
        return self._degrees[key]

    def derive(self, values: RecordedKnobs, varied: set[str], global_batch: int | None) -> RecordedKnobs | None:
        """The combination with batch and accumulation that give the global batch; None when it has another one."""
        if global_batch is None:
            return values
        batch, accumulation = (
            whole_number(values if name in values else self.spec.knobs, name) for name in BATCH_KNOBS
        )
        per_rank, remainder = divmod(global_batch, self.degree(values))
        if remainder:
            return None
        if "batch_size" in varied and "grad_accum" in varied:
            return values if batch * accumulation == per_rank else None
        if "batch_size" in varied:
            return None if per_rank % batch else {**values, "grad_accum": per_rank // batch}
        if per_rank % accumulation == 0:
            return {**values, "batch_size": per_rank // accumulation, "grad_accum": accumulation}
        if "grad_accum" in varied or per_rank % batch:
            return None
        return {**values, "batch_size": batch, "grad_accum": per_rank // batch}


def _baseline(arithmetic: _BatchArithmetic, global_batch: int | None) -> KnobValues:
    """The preset's knobs at that global batch: its batch size, or the next smaller one that divides."""
    knobs = arithmetic.spec.knobs
    if global_batch is None:
        return knobs
    degree = arithmetic.degree(knobs)
    per_rank, remainder = divmod(global_batch, degree)
    if remainder:
        nearest = [size for size in (per_rank * degree, (per_rank + 1) * degree) if size]
        raise _impossible_error(global_batch, nearest)
    most = min(whole_number(knobs, "batch_size"), per_rank)
    batch = next(size for size in range(most, 0, -1) if per_rank % size == 0)
    return {**knobs, "batch_size": batch, "grad_accum": per_rank // batch}


def _candidate(
    arithmetic: _BatchArithmetic, knobs: RecordedKnobs, refuse: Callable[[RunSpec], UserError | None]
) -> Candidate:
    run_spec = candidate_spec(arithmetic.spec, knobs)
    refusal = refuse(run_spec)
    batch, accumulation = (whole_number(run_spec.knobs, name) for name in BATCH_KNOBS)
    return Candidate(
        knobs=knobs,
        process_knobs=process_knobs(run_spec.knobs, knobs),
        world_size=processes_of(run_spec, arithmetic.machine) or 1,
        samples_per_step=batch * accumulation * arithmetic.degree(knobs),
        ruled_out=None if refusal is None else "incompatible",
        reason="" if refusal is None else refusal.line(),
    )


def process_knobs(whole: KnobValues, shown: RecordedKnobs) -> RecordedKnobs:
    """Return the `shown` knobs that need a new process, in a run with the `whole` knobs."""
    if not allows_warm_trials(*(str(whole[name]) for name in ("strategy", "engine", "compile"))):
        return dict(shown)
    return {name: value for name, value in shown.items() if BY_NAME[name].needs_process(value)}


def _attainable(arithmetic: _BatchArithmetic, vary: Vary, wanted: int) -> list[int]:
    """The nearest global batches below and above that the varied values give."""
    attainable: set[int] = set()
    batch = _deciding_batch(vary)
    for values in itertools.product(*batch.values()):
        knobs = {**arithmetic.spec.knobs, **dict(zip(batch, values, strict=True))}
        size = arithmetic.degree(knobs)
        if "batch_size" in batch or "grad_accum" not in batch:
            size *= whole_number(knobs, "batch_size")
        if "grad_accum" in batch:
            size *= whole_number(knobs, "grad_accum")
        # With one of the two given, the other one makes any multiple.
        fixed = "batch_size" in batch and "grad_accum" in batch
        attainable |= {size} if fixed else {size * max(1, wanted // size), size * (wanted // size + 1)}
    below, above = [size for size in attainable if size < wanted], [size for size in attainable if size > wanted]
    return [*([max(below)] if below else []), *([min(above)] if above else [])]


def _impossible_error(wanted: int, possible: Sequence[int]) -> UserError:
    nearest = min(possible, key=lambda size: abs(size - wanted), default=None)
    return UserError(
        f"--global-batch {wanted}: no batch_size x grad_accum x data-parallel degree gives it",
        key="--global-batch",
        allowed=[str(size) for size in sorted(possible)],
        nearest=None if nearest is None else str(nearest),
    )


def _too_many_error(count: int, vary: Vary) -> UserError:
    """The error about too many candidates: their count, and the fewest knobs to leave out."""
    dropped, left_count = fewest_to_drop(vary, count, MOST_CANDIDATES)
    words = f"{count:,} candidates are more than {MOST_CANDIDATES:,}"
    return UserError(
        f"{words}; without {' and '.join(dropped)} there are about {left_count:,}",
        key="--vary",
        advice="leaving out " + " and ".join(f"--vary {name}" for name in dropped),
    )

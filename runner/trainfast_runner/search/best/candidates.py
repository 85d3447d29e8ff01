"""Enumerate the candidates of a best-fit search: the combinations of knobs with one global batch, legal or refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from trainfast_runner.errors import UserError
from trainfast_runner.machine.devices import Machine
from trainfast_runner.search.best.global_batch import MAX_CANDIDATES, GlobalBatch
from trainfast_runner.search.best.too_large import TOO_LARGE, excess_text
from trainfast_runner.search.candidate_spec import BATCH_KNOBS, candidate_spec, takes_warm_trials
from trainfast_runner.search.journal.best import Candidate, Space
from trainfast_runner.settings.device_counts import world_size
from trainfast_runner.settings.knob_type import KnobValues, whole_number
from trainfast_runner.settings.knobs import KNOBS_BY_NAME
from trainfast_runner.settings.spec import RunSpec
from trainfast_runner.settings.vary import Vary, combinations_of, fewest_to_drop

Refuse = Callable[[RunSpec], UserError | None]
"""Returns the UserError of a run that cannot start here; None when it can."""


def enumerate_space(spec: RunSpec, machine: Machine, vary: Vary, size: int | None, refuse: Refuse) -> Space:
    """Return every combination of the varied values with a global batch of `size`, the baseline among them.

    None leaves the global batch free. Raises UserError for more candidates than `MAX_CANDIDATES`, and for a global
    batch that nothing varied can give.
    """
    global_batch = GlobalBatch(spec, machine, vary, size)
    count = global_batch.count()
    if count > MAX_CANDIDATES:
        raise _too_many_error(count, vary)
    base_knobs = global_batch.baseline_knobs()
    unvaried_batch_knobs = [name for name in BATCH_KNOBS if name not in vary]
    candidate_knob_names = [
        *vary,
        *(name for name in unvaried_batch_knobs if global_batch.derives_knobs or base_knobs[name] != spec.knobs[name]),
    ]
    combinations: list[KnobValues] = []
    dropped_count = 0
    for combination in combinations_of(vary):
        complete = global_batch.complete(combination)
        if complete is None:
            dropped_count += 1
        else:
            combinations.append({name: complete.get(name, base_knobs[name]) for name in candidate_knob_names})
    if not combinations and size is not None:
        raise global_batch.nearest_error()
    baseline = {name: base_knobs[name] for name in candidate_knob_names}
    if baseline not in combinations:
        combinations.insert(0, baseline)
    candidates = [_candidate(spec, machine, global_batch, knobs, refuse) for knobs in combinations]
    return Space(candidates=candidates, baseline_number=combinations.index(baseline), dropped=dropped_count)


def _candidate(
    spec: RunSpec, machine: Machine, global_batch: GlobalBatch, knobs: KnobValues, refuse: Refuse
) -> Candidate:
    run_spec = candidate_spec(spec, knobs)
    refusal = refuse(run_spec)
    batch, accumulation = (whole_number(run_spec.knobs, name) for name in BATCH_KNOBS)
    return Candidate(
        knobs=knobs,
        process_knobs=process_knobs(run_spec.knobs, knobs),
        world_size=processes_of(run_spec, machine) or 1,
        samples_per_step=batch * accumulation * global_batch.degree(knobs),
        excluded_as=None if refusal is None else "incompatible",
        reason="" if refusal is None else refusal.line_without_option(),
    )


def processes_of(spec: RunSpec, machine: Machine) -> int | None:
    """Return the number of processes of a run; None when the machine has too few devices."""
    try:
        return world_size(spec, machine)
    except UserError:
        return None


def process_knobs(run_knobs: KnobValues, knobs: KnobValues) -> KnobValues:
    """Return the knobs of a candidate that need a new process, in a run with all of `run_knobs`."""
    if not takes_warm_trials(run_knobs):
        return dict(knobs)
    return {name: value for name, value in knobs.items() if KNOBS_BY_NAME[name].needs_process(value)}


def with_predictions(space: Space, bytes_of: Mapping[int, int], limit_of: Callable[[int], int | None]) -> Space:
    """Return the space with the predicted bytes of some candidates (of the fullest rank), and too large ones ruled out.

    `limit_of` returns the bytes that each rank of a candidate may take; a candidate without a limit is not ruled out.
    The baseline is never ruled out: its run shows the error of the prediction.
    """
    candidates = list(space.candidates)
    for number, needed_bytes in bytes_of.items():
        candidate = candidates[number]
        predicted = msgspec.structs.replace(candidate, predicted_bytes=needed_bytes)
        limit_bytes = limit_of(number)
        if candidate.excluded_as is None and limit_bytes is not None and needed_bytes > limit_bytes:
            excess_bytes = needed_bytes - limit_bytes
            predicted = msgspec.structs.replace(predicted, excess_bytes=excess_bytes)
            if number != space.baseline_number:
                reason = excess_text(needed_bytes, limit_bytes)
                predicted = msgspec.structs.replace(predicted, excluded_as=TOO_LARGE, reason=reason)
        candidates[number] = predicted
    return msgspec.structs.replace(space, candidates=candidates)


def changes_training(candidate: Candidate, baseline: Candidate) -> list[str]:
    """Return the knobs by which a candidate trains differently from the baseline; empty if it trains the same."""
    overridden = [
        name
        for name, value in candidate.knobs.items()
        if name in KNOBS_BY_NAME and not KNOBS_BY_NAME[name].keeps_training(baseline.knobs[name], value)
    ]
    return [*overridden, *(["global batch"] if candidate.samples_per_step != baseline.samples_per_step else [])]


def _too_many_error(count: int, vary: Vary) -> UserError:
    """Return the error about too many candidates: their count, and the fewest knobs to leave out."""
    dropped_knobs, left_count = fewest_to_drop(vary, count, MAX_CANDIDATES)
    text = f"{count:,} candidates are more than {MAX_CANDIDATES:,}"
    return UserError(
        f"{text}; without {' and '.join(dropped_knobs)} there are about {left_count:,}",
        key="--vary",
        advice=f"leaving out {' and '.join(dropped_knobs)}",
        option="leaving out " + " and ".join(f"--vary {name}" for name in dropped_knobs),
    )

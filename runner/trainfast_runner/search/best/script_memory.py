"""Predict the memory of a script's candidates from its trials: a line through the peaks of two batch sizes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import msgspec

from trainfast_runner.search.best.candidates import BATCH_KNOBS, predicted
from trainfast_runner.search.best.journal import Candidate, Space, Trial
from trainfast_runner.search.fit import fit_lines

LEAST_SIZES = 2
"""Batch sizes that a line needs."""
PHASE = "step"


def with_fitted_memory(space: Space, trials: Iterable[Trial], limit_bytes: int | None, device: str) -> Space:
    """Return the space with the memory of candidates that differ only in their batch from trials of two sizes or more.

    Those that need more than the limit, with the error of the line for them, are ruled out.
    """
    peaks: dict[tuple[tuple[str, object], ...], dict[int, int]] = defaultdict(dict)
    for trial in trials:
        one = space.candidates[trial.candidate]
        if trial.peak_allocated_bytes is not None and "batch_size" in one.knobs:
            peaks[_others(one)][one.knobs["batch_size"]] = trial.peak_allocated_bytes
    expected: dict[int, int | None] = {}
    too_large: dict[int, int | None] = {}
    for number, one in enumerate(space.candidates):
        sizes, batch_size = peaks.get(_others(one), {}), one.knobs.get("batch_size", 0)
        if len(sizes) < LEAST_SIZES or batch_size in sizes or one.ruled_out is not None:
            continue
        points = {size: {PHASE: peak} for size, peak in sizes.items()}
        line = fit_lines(0, points, limit_bytes or 0, device)
        need = line.need_bytes(batch_size)
        expected[number] = round(need)
        if limit_bytes is not None and need - line.error_at(batch_size) > limit_bytes:
            too_large[number] = round(need)
    return predicted(predicted(space, expected, None), too_large, limit_bytes)


def with_seen_samples(space: Space, trial: Trial) -> Space:
    """Return the space with the samples of a step as a trial saw them: a script may accumulate by itself."""
    asked = space.candidates[trial.candidate].samples_per_step
    if trial.samples_per_step in (0, asked):
        return space
    seen = [
        msgspec.structs.replace(one, samples_per_step=max(1, one.samples_per_step * trial.samples_per_step // asked))
        for one in space.candidates
    ]
    return msgspec.structs.replace(space, candidates=seen)


def _others(one: Candidate) -> tuple[tuple[str, object], ...]:
    """The knobs beside batch and accumulation, as a key."""
    return tuple((name, value) for name, value in one.knobs.items() if name not in BATCH_KNOBS)

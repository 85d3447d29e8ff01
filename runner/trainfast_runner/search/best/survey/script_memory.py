"""Predict the memory of a script's candidates from its trials: a traced step, or the peaks of two batch sizes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping

import msgspec

from trainfast_runner.search.best.candidates import with_predictions
from trainfast_runner.search.candidate_spec import BATCH_KNOBS
from trainfast_runner.search.journal.best import Candidate, Space, Trial
from trainfast_runner.search.memory.fit_lines import NOISE_BYTES, fit_lines
from trainfast_runner.search.memory.traced_script import SCRIPT_PHASE, TRACED_SHARE, TracedPeak
from trainfast_runner.search.speed.process_starts import KnobsKey, knobs_key

MIN_SIZES = 2
"""Batch sizes that a line needs."""


def with_fitted_memory(space: Space, trials: Iterable[Trial], limit_bytes: int | None, device: str) -> Space:
    """Return the space with the memory of candidates that differ from a tried candidate only in the batch.

    Two tried sizes or more give a line; with one size its traced step is used. Candidates that need more than the
    limit, with the error of the prediction for them, are ruled out.
    """
    trials_by_knobs: dict[KnobsKey, dict[int, Trial]] = defaultdict(dict)
    for trial in trials:
        candidate = space.candidates[trial.candidate_number]
        if trial.peak_allocated_bytes is not None and "batch_size" in candidate.knobs:
            trials_by_knobs[_knobs_but_batch(candidate)].setdefault(candidate.batch_size, trial)
    needed_bytes: dict[int, int] = {}
    limits_bytes: dict[int, int] = {}
    for number, candidate in enumerate(space.candidates):
        trials_by_size = trials_by_knobs.get(_knobs_but_batch(candidate), {})
        if candidate.batch_size in trials_by_size or candidate.excluded_as is not None:
            continue
        prediction = _by_sizes(trials_by_size, candidate.batch_size, device) or _by_trace(
            space, trials_by_size, candidate, device
        )
        if prediction is None:
            continue
        need_bytes, error_bytes = prediction
        needed_bytes[number] = round(need_bytes)
        if limit_bytes is not None and need_bytes - error_bytes > limit_bytes:
            limits_bytes[number] = limit_bytes
    return with_predictions(space, needed_bytes, limits_bytes.get)


def _by_sizes(trials: Mapping[int, Trial], batch_size: int, device: str) -> tuple[float, float] | None:
    """Return the bytes that a batch needs by the line through two sizes or more, and their largest error."""
    if len(trials) < MIN_SIZES:
        return None
    peaks = {size: {SCRIPT_PHASE: trial.peak_allocated_bytes or 0} for size, trial in trials.items()}
    fit = fit_lines(peaks, device)
    return fit.need_bytes(batch_size), fit.error_at(batch_size)


def _by_trace(
    space: Space, trials: Mapping[int, Trial], candidate: Candidate, device: str
) -> tuple[float, float] | None:
    """Return the bytes that a candidate needs by the traced step of one trial, and their largest error.

    The error is unknown if only one of the two accumulates: gradients then live through a forward pass.
    """
    for size, trial in trials.items():
        if trial.traced is not None:
            measured_bytes = trial.peak_allocated_bytes or 0
            peak = TracedPeak(traced=trial.traced, batch_size=size, measured_bytes=measured_bytes)
            need_bytes = peak.need_bytes(candidate.batch_size)
            error_bytes = NOISE_BYTES[device] + TRACED_SHARE[device] * abs(need_bytes - measured_bytes)
            is_alike = candidate.accumulates == space.candidates[trial.candidate_number].accumulates
            return need_bytes, error_bytes if is_alike else math.inf
    return None


def memory_basis_text(trials: Iterable[Trial]) -> str:
    """Return the basis, in words, of the predicted memory of a script's candidates."""
    with_trace = [trial for trial in trials if trial.traced is not None or trial.untraced]
    ids = [line.run_id for line in with_trace if line.traced is not None]
    reasons = [f"{line.run_id} has no trace: {line.untraced}" for line in with_trace if line.traced is None]
    bases = [f"the traced step of {' and '.join(ids)}"] if ids else []
    return "; ".join([*bases, "trials of two batch sizes of like settings", *reasons])


def with_seen_samples(space: Space, trial: Trial) -> Space:
    """Return the space with the samples of a step as a trial saw them: a script may accumulate by itself."""
    asked_samples = space.candidates[trial.candidate_number].samples_per_step
    if trial.samples_per_step in (0, asked_samples):
        return space
    candidates = [
        msgspec.structs.replace(
            candidate, samples_per_step=max(1, candidate.samples_per_step * trial.samples_per_step // asked_samples)
        )
        for candidate in space.candidates
    ]
    return msgspec.structs.replace(space, candidates=candidates)


def _knobs_but_batch(candidate: Candidate) -> KnobsKey:
    """Return the knobs other than batch and accumulation, as a key."""
    return knobs_key({name: value for name, value in candidate.knobs.items() if name not in BATCH_KNOBS})

"""Fit the effects model to the measured trials of a best-fit search, with scales of the greatest likelihood."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from trainfast_runner.search.effects import Levels, Likelihood, Observation, Posterior, Scales
from trainfast_runner.search.measured_speeds import MAX_VOID_PROCESSES, VOID_LOG_DRIFT, Measurements

MILESTONES = (8, 12, 17, 24, 33, 46, 64, 90)
"""Numbers of own observations at which the scales of the effects are chosen again."""
MAIN_DEVIATIONS, PAIR_DEVIATIONS, PROCESS_DEVIATIONS = (0.15, 0.3, 0.6), (0.04, 0.08, 0.16), (0.003, 0.01, 0.03, 0.08)
"""The `Scales` to choose from: of effects, of pairwise terms, between processes."""


def fit_effects(
    levels: Levels,
    earlier_observations: Sequence[Observation],
    own_observations: Sequence[Observation],
    measurements: Measurements,
    previous_posterior: Posterior | None,
) -> Posterior:
    """Return the posterior after the observations of earlier searches and the own ones of this search.

    `previous_posterior` is one of the same search; do not use it afterwards, because it is extended in place if it
    lacks only the last observations.
    """
    observations = [*earlier_observations, *own_observations]
    center = own_observations[0].value if own_observations else 0.0
    milestone = max((number for number in MILESTONES if number <= len(own_observations)), default=None)
    posterior = previous_posterior
    if milestone is None:
        scales = Scales()
    else:
        milestone_observations = observations[: len(earlier_observations) + milestone]
        count = len(milestone_observations)
        if posterior is not None and posterior.observations[:count] == milestone_observations:
            scales = posterior.scales
        else:
            scales = _scales(levels, center, milestone_observations, measurements)
    if (
        posterior is None
        or posterior.scales != scales
        or posterior.center != center
        or posterior.observations != observations[: len(posterior.observations)]
    ):
        posterior = Posterior(levels, scales, center)
    for observation in observations[len(posterior.observations) :]:
        posterior.add(observation)
    return posterior


def _scales(levels: Levels, center: float, observations: Sequence[Observation], measurements: Measurements) -> Scales:
    """Return the scales under which the observations are most likely."""
    min_deviation = _drift_deviation(measurements)
    deviations = [deviation for deviation in PROCESS_DEVIATIONS if deviation >= min_deviation] or [min_deviation]
    score = cache(Likelihood(levels, observations, center).log_likelihood)
    best = Scales(process=min(deviations, key=lambda deviation: abs(deviation - Scales().process)))
    for _ in range(2):
        best = max((replace(best, main=main) for main in MAIN_DEVIATIONS), key=score)
        best = max((replace(best, pair=pair) for pair in PAIR_DEVIATIONS), key=score)
        best = max((replace(best, process=deviation) for deviation in deviations), key=score)
    return best


def _drift_deviation(measurements: Measurements) -> float:
    """Return the least deviation between processes: their drift if too many drifted for an accident, else 0."""
    if len(measurements.void_run_ids) + len(measurements.drift_variance_by_run) < MAX_VOID_PROCESSES:
        return 0.0
    square = sum(drift * drift for drift in measurements.drifts) / len(measurements.drifts)
    return math.sqrt(square / 2) if square > VOID_LOG_DRIFT * VOID_LOG_DRIFT else 0.0

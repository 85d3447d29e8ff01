"""Duration counters that a run's records show to be something else.

Their numbers moved between drivers, and the old numbers still answer. The sampler drops a counter as soon as it is
sure; the whole record of a run needs less evidence.
"""

from __future__ import annotations

import itertools
from collections.abc import Set as AbstractSet

from trainfast_runner.machine.telemetry.energy import energy_distrust
from trainfast_runner.machine.telemetry.field_values import CAUSE_COUNTERS
from trainfast_runner.machine.telemetry.throttle import CAUSES, REASONS_OF_COUNTER
from trainfast_runner.results.device_conditions.readings import ENERGY_FIELD, Reading, TimedReadings, reading_of, shows

SAMPLES_SHOWN = 2
"""Samples with a reason that refute a still counter: after one, the driver may update it past the record's end."""
SIGHTINGS_MISSED = 7.0
"""A counter is distrusted if this many samples should have shown its reason and none did: chance e^-7, 1 in 1,000."""
BEYOND_POLICY = 2.0
"""Intervals that a counter may lead its policy's counter without a sample that shows its reason: the driver is late."""


def distrusted_counters(samples: TimedReadings) -> frozenset[str]:
    """The counters that one device's samples (with their times, oldest first) refute."""
    answered = [
        sample for sample in samples if sample[1].temperature_c is not None or sample[1].throttle_reasons is not None
    ]
    distrusted = {
        field for field in REASONS_OF_COUNTER if _dropped_by_sampler(field, answered) or _stands_still(field, answered)
    }
    running_unseen = {field for field in CAUSE_COUNTERS if _runs_unseen(field, answered, distrusted)}
    energy = {ENERGY_FIELD} if energy_distrust(samples) is not None else set()
    return frozenset(distrusted | running_unseen | energy)


def _dropped_by_sampler(field: str, answered: TimedReadings) -> bool:
    """True if the sampler dropped the counter: it was there, and is missing from the last sample with readings."""
    present = [reading_of(sample, field) is not None for _, sample in answered]
    return any(present) and not present[-1]


def _stands_still(field: str, answered: TimedReadings) -> bool:
    """True if the counter never moves though samples before the last show its reasons."""
    reasons = REASONS_OF_COUNTER[field]
    with_field = [sample for _, sample in answered if reading_of(sample, field) is not None]
    shown = sum(bool(shows(reasons, sample)) for sample in with_field[:-1])
    return shown >= SAMPLES_SHOWN and len({reading_of(sample, field) for sample in with_field}) == 1


def _runs_unseen(field: str, answered: TimedReadings, distrusted: AbstractSet[str]) -> bool:
    """True if the counter runs between samples without its reasons: further than its policy's trusted counter, or
    without one for longer than can go unseen."""
    reasons = REASONS_OF_COUNTER[field]
    policy = next(cause.policy_counter for cause in CAUSES if field in cause.reason_counters)
    claimed = beyond = 0.0
    for (t0, earlier), (t1, later) in itertools.pairwise(answered):
        # Where a sample shows the reason the counter may run: only its growth without one speaks against it.
        if shows(reasons, earlier) is not False or shows(reasons, later) is not False or t1 <= t0:
            continue
        grown = _growth(field, earlier, later)
        policy_growth = None if policy is None or policy in distrusted else _growth(policy, earlier, later)
        claimed += (grown or 0.0) / (t1 - t0)
        beyond += 0.0 if grown is None or policy_growth is None else max(0.0, grown - policy_growth) / (t1 - t0)
    seen = sum(bool(shows(reasons, sample)) for _, sample in answered)
    return beyond > BEYOND_POLICY or claimed > SIGHTINGS_MISSED + seen


def _growth(field: str, earlier: Reading, later: Reading) -> float | None:
    first, last = reading_of(earlier, field), reading_of(later, field)
    return None if first is None or last is None else max(0.0, last - first)

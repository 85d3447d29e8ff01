"""A batch of 1 does not fit: by how much, and which knobs would make it fit."""

from __future__ import annotations

import re
from dataclasses import replace

from trainfast_runner.launch import RunPlan
from trainfast_runner.memory_model import cached_model
from trainfast_runner.oom_advice import UNITS, cheapest
from trainfast_runner.problem import Problem
from trainfast_runner.search.decide import Known
from trainfast_runner.search.journal import Change, Probe

MOST_CHANGES = 4
_ASKED = re.compile(r"(?:tried to allocate|Tried to allocate) ([\d.]+) (bytes|KiB|MiB|GiB)")


def missing_bytes(known: Known) -> int | None:
    """How much more a batch of 1 needs than its rank may use, at the least; None where nothing tells.

    What the prediction says; else what was in use when memory ran out and what was asked for then, beyond the limit.
    """
    limit, probe = _limit(known), _smallest(known)
    predicted = known.predicted
    if limit is not None and predicted is not None and predicted.fixed_bytes is not None:
        needed = predicted.fixed_bytes + (predicted.bytes_per_sample or 0)
        if needed > limit:
            return needed - limit
    if limit is None or probe is None:
        return None
    asked = _ASKED.search(probe.reason)
    wanted = float(asked[1]) * UNITS[asked[2]] if asked else 0.0
    return max(0, round((probe.peak_allocated_bytes or 0) + wanted - limit)) or None


def changes_that_fit(plan: RunPlan, known: Known) -> list[Change]:
    """Changes of one knob, those that the memory model says make a batch of 1 fit; without a model the usual ones."""
    limit, probe = _limit(known), _smallest(known)
    knobs = {**plan.spec.knobs, "batch_size": 1}
    fixes = cheapest(knobs, plan.device, probe.phase if probe else None, probe.reason if probe else "", limit)
    found = []
    for fix in fixes:
        if fix.knob == "batch_size":
            continue
        needs = _predicted_bytes(plan, {**knobs, fix.knob: fix.value})
        if needs is not None and limit is not None and needs > limit:
            continue
        found.append(Change(settings={fix.knob: fix.value}, words=fix.saves, costs=fix.costs, predicted_bytes=needs))
    return found[:MOST_CHANGES]


def _predicted_bytes(plan: RunPlan, knobs: dict[str, object]) -> int | None:
    try:
        spec = replace(plan.spec, knobs=knobs)  # type: ignore[arg-type]
        model = cached_model(spec, plan.device, plan.python)
        return None if model is None else model.predict(spec, plan.world_size).total_bytes
    except (Problem, ValueError):
        return None


def _smallest(known: Known) -> Probe | None:
    failed = [probe for probe in known.probes if probe.outcome == "oom"]
    return min(failed, key=lambda probe: probe.batch_size, default=None)


def _limit(known: Known) -> int | None:
    probe = _smallest(known)
    if known.limits_bytes:
        rank = (probe.rank if probe else None) or 0
        return known.limits_bytes[min(rank, len(known.limits_bytes) - 1)]
    rooms = [one.room_bytes for probe in known.probes for one in probe.ranks if one.room_bytes]
    return min(rooms, default=None)

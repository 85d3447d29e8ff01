"""What the devices did while the measured steps ran: energy, throttled time, memory, from sampled counters."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trainfast_runner.records import Throttle
from trainfast_runner.run_records import DeviceSample
from trainfast_runner.telemetry.throttle import kind

Samples = list[tuple[int, DeviceSample]]

LEAST_COVERED = 0.5
"""Share of the window that samples must cover before a figure is given for all of it."""


@dataclass(frozen=True)
class Window:
    """The span of the measured steps, CLOCK_MONOTONIC nanoseconds."""

    begin_ns: int
    end_ns: int

    @property
    def ns(self) -> int:
        return self.end_ns - self.begin_ns


def energy_joules(devices: list[Samples], window: Window | None) -> float | None:
    """Energy in the window summed over devices, from the energy counters; None when one of them has none."""
    if window is None or not devices:
        return None
    total = 0.0
    for samples in devices:
        share = _growth_share(samples, window, lambda sample: sample.energy_mj)
        if share is None:
            return None
        total += share * window.ns / 1000
    return total


def throttle_fractions(devices: list[Samples], window: Window | None) -> Throttle:
    """Throttled time by heat and by power, each device and the worst; None where no sample can tell."""
    if window is None:
        return Throttle()
    rows: list[dict[str, Any]] = []
    for samples in devices:
        if not samples:
            continue
        thermal, thermal_source = _throttled(samples, window, "thermal", lambda s: s.thermal_violation_ns)
        power, power_source = _throttled(samples, window, "power", lambda s: s.power_violation_ns)
        rows.append(
            {
                "index": samples[0][1].index,
                "uuid": samples[0][1].uuid,
                "thermal_fraction": thermal,
                "thermal_source": thermal_source,
                "power_fraction": power,
                "power_source": power_source,
            }
        )
    return Throttle(
        thermal_fraction=_worst([row["thermal_fraction"] for row in rows]),
        power_fraction=_worst([row["power_fraction"] for row in rows]),
        devices=rows,
    )


def peak_used_bytes(devices: list[Samples]) -> int | None:
    """The fullest that any of the devices was seen."""
    used = [s.memory_used_bytes for samples in devices for _, s in samples if s.memory_used_bytes is not None]
    return max(used, default=None)


def _throttled(
    samples: Samples, window: Window, wanted: str, counter: Callable[[DeviceSample], int | None]
) -> tuple[float | None, str | None]:
    """Share of the window, and whether a counter of the driver or the sampled bits say so."""
    share = _growth_share(samples, window, counter)
    if share is not None:
        return min(1.0, max(0.0, share)), "counter"
    share = _held_share(samples, window, lambda s: None if s.throttle_reasons is None else wanted in _kinds(s))
    return share, None if share is None else "sampled"


def _kinds(sample: DeviceSample) -> set[str | None]:
    return {kind(name) for name in sample.throttle_reasons or ()}


def _growth_share(samples: Samples, window: Window, counter: Callable[[DeviceSample], int | None]) -> float | None:
    """How much a counter grew a nanosecond of the window, readings joined by straight lines.

    The part of the window outside all readings counts as the rest of it did; None when they cover less than half.
    """
    points = [(t_ns, value) for t_ns, sample in samples if (value := counter(sample)) is not None]
    if len(points) < 2:
        return None
    begin, end = max(window.begin_ns, points[0][0]), min(window.end_ns, points[-1][0])
    if end <= begin or end - begin < LEAST_COVERED * window.ns:
        return None
    grown = _value_at(points, end) - _value_at(points, begin)
    return None if grown < 0 else grown / (end - begin)


def _value_at(points: list[tuple[int, int]], t_ns: int) -> float:
    """Between two readings on the straight line through them."""
    for (t0, v0), (t1, v1) in itertools.pairwise(points):
        if t0 <= t_ns <= t1:
            return v0 + (v1 - v0) * (t_ns - t0) / (t1 - t0) if t1 > t0 else float(v1)
    return float(points[-1][1])


def _held_share(samples: Samples, window: Window, holds: Callable[[DeviceSample], bool | None]) -> float | None:
    """Share of the window in which something was true, each sample standing until the next one."""
    known, true = 0, 0
    ends = [t_ns for t_ns, _ in samples[1:]] + [window.end_ns]
    for (t_ns, sample), until in zip(samples, ends, strict=True):
        held = min(until, window.end_ns) - max(t_ns, window.begin_ns)
        answer = holds(sample)
        if held > 0 and answer is not None:
            known += held
            true += held if answer else 0
    return true / known if known and known >= LEAST_COVERED * window.ns else None


def _worst(fractions: list[float | None]) -> float | None:
    return max((fraction for fraction in fractions if fraction is not None), default=None)

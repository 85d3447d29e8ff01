"""Conditions that void a measurement: other processes that took the CPU, and GPUs throttled for heat or a power brake.

A GPU at its power limit is in its ordinary state under load, and voids nothing.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from trainfast_runner.machine.cpu.other_load import CpuWindow
from trainfast_runner.records.result import Result
from trainfast_runner.results.device_conditions.device_track import DeviceConditions
from trainfast_runner.search.journal.best import Attempt, BestJournal, BestLine

VOIDING_OTHERS_SHARE = 0.15
"""A measurement is void if other processes took more than this share of the cores, as in the diagnosis of a run."""
VOIDING_THROTTLED_SHARE = 0.02
"""A measurement is void if a GPU was throttled for more than this share of the time: a search looks for that gain."""
VOIDING_FRACTIONS = {"thermal": "thermal_fraction", "brake": "brake_fraction"}
"""Causes of throttling that void a measurement, with their fields in a run's `Throttle`."""
USUAL_DISTURBANCES, LAST_MEASUREMENTS = 2, 8
"""Chosen, not measured: with this many disturbed measurements of a candidate, or among the last `LAST_MEASUREMENTS`,
the next counts: the disturbance is the machine's normal noise."""


class CpuDisturbance:
    """The CPU time that processes other than the search's own take from now on."""

    def __init__(self) -> None:
        self._window = CpuWindow()

    def void_reason(self) -> str | None:
        """Return the share of the CPU that other processes took since, in words; None if small or unknown."""
        others = self._window.others_cores()
        return None if others is None else _others_text(others / len(os.sched_getaffinity(0)))


def throttled_reason(devices: Sequence[DeviceConditions], begin_ns: int, end_ns: int) -> str | None:
    """Return the GPU that was throttled for too much of the time, in words; None if none was."""
    for device in devices:
        for cause in VOIDING_FRACTIONS:
            share = (device.throttled_ms.get(cause) or 0.0) * 1e6 / max(1, end_ns - begin_ns)
            if share > VOIDING_THROTTLED_SHARE:
                return f"GPU {device.index} was throttled ({cause}) for {share:.0%} of the time"
    return None


def void_run_reason(result: Result) -> str | None:
    """Return the reason that a finished run does not count, in words; None if it counts."""
    percent = result.conditions.others_cpu_percent
    if percent is not None and (text := _others_text(percent / 100)) is not None:
        return text
    for cause, field in VOIDING_FRACTIONS.items():
        share: float | None = getattr(result.throttle, field)
        if share is not None and share > VOIDING_THROTTLED_SHARE:
            return f"a GPU was throttled ({cause}) for {share:.0%} of the time"
    return None


def _others_text(share: float) -> str | None:
    return f"other processes took {share:.0%} of the CPU" if share > VOIDING_OTHERS_SHARE else None


def is_usually_disturbed(lines: Sequence[BestLine], number: int) -> bool:
    """True if so many of the last measurements, or of this candidate's, were disturbed that disturbance is normal."""
    attempts = BestJournal(tuple(lines)).attempts
    of_candidate = [line for line in attempts if line.candidate_number == number]
    counts = [sum(map(_is_disturbed, attempts[-LAST_MEASUREMENTS:])), sum(map(_is_disturbed, of_candidate))]
    return max(counts) >= USUAL_DISTURBANCES


def _is_disturbed(line: Attempt) -> bool:
    """True if a measurement is void, or counts although it was disturbed."""
    return line.outcome == "void" or line.counts_disturbed

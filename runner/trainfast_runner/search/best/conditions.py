"""Conditions that void a measurement: other processes that took the CPU, and GPUs throttled for heat or a power brake.

A GPU at its power limit is in its ordinary state under load, and voids nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from trainfast_runner.machine.cpu import CpuWindow
from trainfast_runner.records.result import Doubt
from trainfast_runner.results.bottleneck_rules import OTHERS_CPU_PERCENT
from trainfast_runner.results.device_conditions import DeviceConditions
from trainfast_runner.results.doubts import DOUBTFUL_THROTTLED_SHARE, THROTTLING_KINDS
from trainfast_runner.search.best_journal import Attempt, BestJournal, BestLine

VOIDING_KINDS = ("other_processes", *THROTTLING_KINDS.values())
"""Kinds of doubt that void a measurement."""
USUAL_DISTURBANCES, LAST_MEASUREMENTS = 2, 8
"""Chosen, not measured: with this many disturbed measurements of a candidate, or among the last `LAST_MEASUREMENTS`,
the next counts: the disturbance is the machine's normal noise."""


class CpuDisturbance:
    """The CPU time that processes other than the search's own take from now on."""

    def __init__(self) -> None:
        self._window = CpuWindow()

    def doubt(self) -> Doubt | None:
        """Return the share of the CPU that other processes took since; None if small or unknown."""
        others = self._window.others_cores()
        percent = None if others is None else 100 * others / len(os.sched_getaffinity(0))
        if percent is None or percent < OTHERS_CPU_PERCENT:
            return None
        return Doubt(kind="other_processes", text=f"other processes took {percent:.0f} % of the CPU")


def throttled_doubt(devices: Sequence[DeviceConditions], begin_ns: int, end_ns: int) -> Doubt | None:
    """Return the GPU that was throttled for too much of the time; None if none was."""
    for device in devices:
        for cause, kind in THROTTLING_KINDS.items():
            share = (device.throttled_ms.get(cause) or 0.0) * 1e6 / max(1, end_ns - begin_ns)
            if share >= DOUBTFUL_THROTTLED_SHARE:
                text = f"GPU {device.index} was throttled ({cause}) for {share:.0%} of the time"
                return Doubt(kind=kind, text=text)
    return None


def void_reason(found: Iterable[Doubt]) -> str:
    """Return the doubts that void a measurement, in words; empty if none does."""
    return "; ".join(doubt.text for doubt in found if doubt.kind in VOIDING_KINDS)


def is_usually_disturbed(lines: Sequence[BestLine], number: int) -> bool:
    """True if so many of the last measurements, or of this candidate's, were disturbed that disturbance is normal."""
    attempts = BestJournal(tuple(lines)).attempts
    of_candidate = [line for line in attempts if line.candidate_number == number]
    counts = [sum(map(_is_disturbed, attempts[-LAST_MEASUREMENTS:])), sum(map(_is_disturbed, of_candidate))]
    return max(counts) >= USUAL_DISTURBANCES


def _is_disturbed(line: Attempt) -> bool:
    """True if a measurement is void, or counts although it was disturbed."""
    return line.outcome == "void" or line.counts_disturbed

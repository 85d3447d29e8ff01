"""Time of each phase of a step, measured without making host or device wait.

`enter(phase)` ends one interval and begins the next, so the phases of a step add up to the step. Where forward and
backward cannot be told apart (a pipeline's schedule interleaves them) their phase is `forward_backward`: both are then
null, their time is in `other`, and the phases that are not null still add up to the step. On CPU the marks are
monotonic times. On CUDA they are events on the stream, read a step later: a phase lasts as long as the device works
on it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ..shared.words import STEP_PHASES

WAKE_NS = 1_000_000
"""An event may be complete for this long before the wait for it returns."""
UNSPLIT_PHASE = "forward_backward"
"""Phase of a forward and backward that cannot be told apart."""
StepTimes = Callable[[], tuple[int, dict[str, float | None]]]
"""Returns a step's end (CLOCK_MONOTONIC nanoseconds), and `step_ms` with every phase's `..._ms`, as soon as the device
has passed the step's marks."""


def make_clock(device: torch.device) -> StepClock:
    """Make the clock of `device`; its first step begins now."""
    return CudaClock() if device.type == "cuda" else HostClock()


def _fields(total_ms: float, phases_ms: dict[str, float]) -> dict[str, float | None]:
    unknown = ("forward", "backward") if UNSPLIT_PHASE in phases_ms else ()
    measured_ms = {name: phases_ms.get(name, 0.0) for name in STEP_PHASES if name != "other" and name not in unknown}
    phase_fields = {f"{name}_ms": measured_ms.get(name) for name in STEP_PHASES if name != "other"}
    return {"step_ms": total_ms, **phase_fields, "other_ms": total_ms - sum(measured_ms.values())}


class HostClock:
    """The clock of a CPU: marks are times already."""

    def __init__(self) -> None:
        self._step_start_ns = self._since_ns = time.monotonic_ns()
        self._phase = "other"
        self._spent_ns: dict[str, int] = {}

    def enter(self, phase: str) -> None:
        """Close the running interval now."""
        now_ns = time.monotonic_ns()
        self._spent_ns[self._phase] = self._spent_ns.get(self._phase, 0) + now_ns - self._since_ns
        self._phase, self._since_ns = phase, now_ns

    def end_step(self) -> StepTimes:
        """End the step; its times are known at once."""
        self.enter("other")
        phases_ms = {name: ns / 1e6 for name, ns in self._spent_ns.items()}
        end_ns = self._since_ns
        fields = _fields((end_ns - self._step_start_ns) / 1e6, phases_ms)
        self._step_start_ns, self._spent_ns = end_ns, {}
        return lambda: (end_ns, fields)


class CudaClock:
    """The clock of a GPU: marks are events, taken from a pool and given back when read.

    A step ends when the last one did, plus the device's own measure. The device's clock drifts from the host's (50 ppm
    are 4 s a day), so each end is kept between two host times: when its last mark was queued and when that mark was
    found complete. Where the host had to wait for the mark, the step ended just before the wait did.
    """

    def __init__(self) -> None:
        self._pool: list[Any] = []
        torch.cuda.synchronize()
        self._end_ns = time.monotonic_ns()
        self._marks: list[tuple[str, Any]] = [("other", self._mark())]

    def enter(self, phase: str) -> None:
        """Queue a mark after the work queued until now."""
        self._marks.append((phase, self._mark()))

    def end_step(self) -> StepTimes:
        """Queue the step's last mark, which is the next step's first."""
        queued_ns = time.monotonic_ns()
        self.enter("other")
        marks, self._marks = self._marks, [self._marks[-1]]
        return partial(self.settle, marks, queued_ns)

    def settle(self, marks: list[tuple[str, Any]], queued_ns: int) -> tuple[int, dict[str, float | None]]:
        """Turn one step's marks into times; wait for its last mark only, which was queued at `queued_ns`."""
        last_event = marks[-1][1]
        had_to_wait = not last_event.query()
        last_event.synchronize()
        found_ns = time.monotonic_ns()
        phases_ms: dict[str, float] = {}
        for (phase, begin), (_, end) in itertools.pairwise(marks):
            phases_ms[phase] = phases_ms.get(phase, 0.0) + begin.elapsed_time(end)
        total_ms = sum(phases_ms.values())
        earliest_ns = max(queued_ns, found_ns - WAKE_NS) if had_to_wait else queued_ns
        self._end_ns = min(max(self._end_ns + round(total_ms * 1e6), earliest_ns), found_ns)
        self._pool.extend(event for _, event in marks[:-1])
        return self._end_ns, _fields(total_ms, phases_ms)

    def _mark(self) -> Any:
        event = self._pool.pop() if self._pool else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


StepClock = HostClock | CudaClock
"""Marks the phases of steps: `enter` begins a phase, `end_step` ends the step and begins the next one in `other`."""

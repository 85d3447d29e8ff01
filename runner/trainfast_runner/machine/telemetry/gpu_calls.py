"""Calls about one GPU after another: one that hangs delays no other, and its GPU is left alone for a while."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from trainfast_runner.machine.telemetry import failures
from trainfast_runner.machine.telemetry.device import Device
from trainfast_runner.machine.telemetry.timed_calls import Job, TimedCalls

T = TypeVar("T")

_SHORTEST_REST_NS = 1_000_000_000
_LONGEST_REST_NS = 60_000_000_000
"""Shortest and longest pause in the calls to a GPU after one has hung."""


@dataclass(frozen=True)
class Hang:
    """A GPU's call that timed out, and when the GPU is asked again."""

    job: Job[Any]
    rest_until_ns: int
    rest_ns: int

    def has_recovered(self, t_ns: int) -> bool:
        """True once the GPU has answered for long enough to be treated as any other."""
        return self.job.ended and t_ns > self.rest_until_ns + _LONGEST_REST_NS


class GpuCalls:
    """Runs calls about GPUs, and remembers which of them hung."""

    def __init__(self, stopping: threading.Event | None) -> None:
        """Once `stopping` is set, no call is waited for longer than a fraction of a second."""
        self.timed = TimedCalls(stopping)
        self._hangs: dict[int, Hang] = {}
        """The last call that took too long, by GPU index."""

    @property
    def any_hanging(self) -> bool:
        """True if a call is still in the driver."""
        return any(not hang.job.ended for hang in self._hangs.values())

    def hung_before(self, device: Device) -> bool:
        """True if a call about this GPU took too long, and the GPU has not yet answered well for long."""
        return device.index in self._hangs

    def is_rested(self, device: Device, t_ns: int) -> bool:
        """True if the call that hung has come back, and the GPU may be asked again."""
        hang = self._hangs.get(device.index)
        return hang is not None and hang.job.ended and t_ns >= hang.rest_until_ns

    def run(
        self, devices: Sequence[Device], call: Callable[[Device], T], timeout_s: float, t_ns: int
    ) -> list[tuple[Device, Job[T]]]:
        """Call for each of these GPUs; return the calls that ended, whose errors are in their jobs.

        A GPU whose call takes longer than `timeout_s` is marked as not answering.
        """
        jobs = [Job(partial(call, device)) for device in devices]
        self.timed.run(jobs, timeout_s)
        ended = []
        for device, job in zip(devices, jobs, strict=True):
            if job.ended:
                ended.append((device, job))
            else:
                self._leave_alone(device, job, t_ns)
        return ended

    def refresh(self, devices: Sequence[Device], t_ns: int) -> None:
        """Forget the hangs of GPUs that have recovered, and renew the sentences about the others."""
        self._hangs = {index: hang for index, hang in self._hangs.items() if not hang.has_recovered(t_ns)}
        for device in devices:
            hang = self._hangs.get(device.index)
            if hang is not None and not hang.job.ended:
                device.error = _sentence(hang.job)

    def _leave_alone(self, device: Device, job: Job[Any], t_ns: int) -> None:
        """Mark the GPU; it rests for twice as long as after its hang before."""
        earlier_hang = self._hangs.get(device.index)
        rest_ns = min(earlier_hang.rest_ns * 2, _LONGEST_REST_NS) if earlier_hang else _SHORTEST_REST_NS
        self._hangs[device.index] = Hang(job, t_ns + rest_ns, rest_ns)
        device.fail(_sentence(job), lost=False)


def _sentence(job: Job[Any]) -> str:
    return failures.slow_call_sentence(job.age_s, "this GPU")

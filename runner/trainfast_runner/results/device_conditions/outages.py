"""The times in which one device gave no reading, and the growth of its counters meanwhile."""

from __future__ import annotations

from typing import NamedTuple

from trainfast_runner.machine.telemetry.throttle import CAUSES
from trainfast_runner.results.device_conditions.counter_growth import CounterGrowth
from trainfast_runner.results.device_conditions.readings import Reading, is_answer

ENERGY = "energy"
"""Key of the joules beside the causes in an outage's growth."""
LATE_NS = 1_000_000_000
"""Nanoseconds that a counter may be ahead of the clock: the driver updates it in steps."""


class Outage(NamedTuple):
    """The time between two answers of a device, and the growth of its counters meanwhile."""

    begin_ns: int
    silent_ns: int
    """Time of the first sample without an answer."""
    end_ns: int
    grown: dict[str, float]
    """Growth of the counters by cause, in nanoseconds; of the energy in joules."""
    back: bool = True
    """False if no answer came until the last sample."""


class OutageLog:
    """The outages of one device, from its samples in the order of their time."""

    def __init__(self, growth: CounterGrowth) -> None:
        self.ended: list[Outage] = []
        """Outages after which the device answered again, oldest first."""
        self._growth = growth
        self._answered: tuple[int, Reading] | None = None
        """Time and sample of the device's last answer."""
        self._silent_ns: int | None = None
        """Time of the first sample without an answer since then."""

    def add(self, t_ns: int, sample: Reading) -> None:
        """Take the next sample; an outage that it ends keeps the growth of the counters, whose moment is unknown."""
        if not is_answer(sample):
            self._silent_ns = t_ns if self._silent_ns is None else self._silent_ns
            return
        before, self._answered = self._answered, (t_ns, sample)
        silent_ns, self._silent_ns = self._silent_ns, None
        if before is not None and silent_ns is not None:
            began_ns, last_answer = before
            grown = self._grown(last_answer, sample, t_ns - began_ns)
            self.ended.append(Outage(began_ns, silent_ns, t_ns, grown))

    def all_until(self, t_ns: int) -> list[Outage]:
        """The outages after a first answer, also one that has not ended by the newest sample at `t_ns`."""
        if self._answered is None or self._silent_ns is None:
            return self.ended
        return [*self.ended, Outage(self._answered[0], self._silent_ns, t_ns, {}, back=False)]

    def forget(self, before_ns: int) -> None:
        """Drop the outages that ended before this time."""
        self.ended = [outage for outage in self.ended if outage.end_ns >= before_ns]

    def _grown(self, earlier: Reading, later: Reading, ns: int) -> dict[str, float]:
        """The growth of the counters between the two answers around an outage, without those that ran too far."""
        grown: dict[str, float] = {}
        for cause in CAUSES:
            throttled = self._growth.throttled(cause, earlier, later, ns)
            if throttled.ns is not None and throttled.is_counted and throttled.ns <= ns + LATE_NS:
                grown[cause.name] = min(throttled.ns, float(ns))
        energy = self._growth.energy(earlier, later, ns)
        if energy.joules is not None and not energy.is_integrated:
            grown[ENERGY] = energy.joules
        return grown

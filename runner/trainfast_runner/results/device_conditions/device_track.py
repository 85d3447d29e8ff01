"""One device's conditions in any window: throttled time, clocks, energy and temperature, from its samples."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from typing import NamedTuple

import msgspec

from trainfast_runner.machine.telemetry.throttle import SOURCES
from trainfast_runner.results.device_conditions.counter_growth import CounterGrowth
from trainfast_runner.results.device_conditions.device_rates import DeviceRates
from trainfast_runner.results.device_conditions.outages import ENERGY, Outage, OutageLog
from trainfast_runner.results.device_conditions.rate import Rate
from trainfast_runner.results.device_conditions.readings import Reading

ENERGY_COUNTER, INTEGRATED_POWER = "energy counter", "integrated power"
SAMPLES_DROPPED_AT_ONCE = 256
"""Samples beyond `keep` before the oldest are dropped, so that few additions move all others."""


class DeviceConditions(msgspec.Struct, frozen=True, kw_only=True):
    """Throttling, clocks and energy of one device in a window. Dictionaries are by cause; None was not measured.

    `lost_ms` is throttled time times the loss of SM clock meanwhile: an estimate of the throttling's cost, right for
    work that scales with the clock.
    """

    index: int | None = None
    uuid: str | None = None
    throttled_ms: dict[str, float | None] = {}
    lost_ms: dict[str, float | None] = {}
    sources: dict[str, str] = {}
    clock_loss_fraction: float | None = None
    """1 - SM clock / maximum SM clock, the mean over the time in which the GPU was not idle."""
    sm_clock_mhz: float | None = None
    energy_joules: float | None = None
    energy_source: str | None = None
    temperature_c: float | None = None
    """Temperature at the start of the window."""


class _OutagePart(NamedTuple):
    """The part of an outage that lies in a window; `grown` are the counters' growths over the whole outage."""

    ns: int
    share: float
    grown: dict[str, float]


class _Span(NamedTuple):
    """A window, its ends moved to where the samples reach, its length in ns, and the parts of outages in it."""

    begin_ns: int
    end_ns: int
    ns: int
    outages: list[_OutagePart]

    def mean(self, rate: Rate) -> float | None:
        """Return the mean rate; None if it is unknown."""
        return rate.mean(self.begin_ns, self.end_ns, self.ns)

    def amount(self, rate: Rate, counter: str | None, max_rate: float = math.inf) -> float | None:
        """Return the mean rate times the time; in outages the growth of `counter` instead, if there is one.

        None for an unknown rate.
        """
        mean = self.mean(rate)
        if mean is None:
            return None
        growth_in_outages = [
            (part.ns, part.share * part.grown[counter])
            for part in self.outages
            if counter is not None and counter in part.grown
        ]
        rest_ns = self.ns - sum(ns for ns, _ in growth_in_outages)
        return min(mean, max_rate) * rest_ns + sum(grown for _, grown in growth_in_outages)


class DeviceTrack:
    """One device's samples in the order of their time, and its conditions between any two moments.

    `keep` bounds the samples in memory, None keeps all; `distrusted` are counters that are left out.
    """

    def __init__(self, uuid: str, keep: int | None, distrusted: frozenset[str]) -> None:
        self.uuid = uuid
        self.index: int | None = None
        self.times: list[int] = []
        self._temperatures: list[float | None] = []
        self._keep = keep
        self._last: Reading | None = None
        growth = CounterGrowth(distrusted)
        self._rates, self._outages = DeviceRates(growth), OutageLog(growth)

    def add(self, t_ns: int, sample: Reading) -> None:
        """Take the sample at `t_ns` (CLOCK_MONOTONIC); one that is no newer than the last is left out."""
        if self.times and t_ns <= self.times[-1]:
            return
        self.index = sample.index if self.index is None else self.index
        if self._last is None:
            self._rates.begin(t_ns)
        else:
            self._rates.grow(self._last, sample, self.times[-1], t_ns)
        self._outages.add(t_ns, sample)
        self._rates.extend_ends(sample, is_first=not self.times)
        self._last = sample
        self.times.append(t_ns)
        self._temperatures.append(sample.temperature_c)
        if self._keep is not None and len(self.times) > self._keep + SAMPLES_DROPPED_AT_ONCE:
            self._forget(len(self.times) - self._keep)

    def _forget(self, count: int) -> None:
        del self.times[:count], self._temperatures[:count]
        self._rates.forget(count, self.times[0])
        self._outages.forget(self.times[0])

    def outages(self) -> list[Outage]:
        """The times without an answer after a first one, also one that has not ended."""
        return self._outages.all_until(self.times[-1]) if self.times else []

    def conditions_between(self, begin_ns: int, end_ns: int, *, whole_outages: bool = False) -> DeviceConditions:
        """The conditions between two moments. Time in an outage counts by the counters' growth over the outage.

        With `whole_outages`, ignore outages that reach beyond the two moments: a live one may not have ended yet.
        """
        rates = self._rates
        outages = self._outages_within(begin_ns, end_ns, only_whole=whole_outages)
        span = _Span(self._clamped(begin_ns), self._clamped(end_ns), end_ns - begin_ns, outages)
        # A counter that catches up on earlier time grows faster than the clock.
        throttled_ms = {
            name: _milliseconds(span.amount(rate, name, max_rate=1.0)) for name, rate in rates.throttled.items()
        }
        # The samples around the window: the intervals that they bound overlap it.
        first_index = max(0, bisect_right(self.times, begin_ns) - 1)
        last_index = min(bisect_left(self.times, end_ns), len(self.times) - 1)
        joules = span.amount(rates.energy, ENERGY)
        is_integrated = any(rates.integrated[first_index + 1 : last_index + 1])
        return DeviceConditions(
            index=self.index,
            uuid=self.uuid,
            throttled_ms=throttled_ms,
            lost_ms={name: _milliseconds(span.amount(rate, None, max_rate=1.0)) for name, rate in rates.lost.items()},
            sources={
                name: SOURCES[max(rates.sources[name][first_index + 1 : last_index + 1], default=0)]
                for name, ms in throttled_ms.items()
                if ms is not None
            },
            clock_loss_fraction=span.mean(rates.clock_loss),
            sm_clock_mhz=span.mean(rates.clock),
            energy_joules=joules,
            energy_source=None if joules is None else INTEGRATED_POWER if is_integrated else ENERGY_COUNTER,
            temperature_c=self._temperatures[first_index] if self.times[first_index] <= begin_ns else None,
        )

    def _outages_within(self, begin_ns: int, end_ns: int, *, only_whole: bool) -> list[_OutagePart]:
        """Return the part of each outage that lies in the window."""
        parts = []
        for outage in self._outages.ended:
            covered_ns = min(end_ns, outage.end_ns) - max(begin_ns, outage.begin_ns)
            share = covered_ns / (outage.end_ns - outage.begin_ns)
            if covered_ns > 0 and (share == 1 or not only_whole):
                parts.append(_OutagePart(covered_ns, share, outage.grown))
        return parts

    def _clamped(self, t_ns: int) -> int:
        """The moment, at most as far outside the samples as the nearest interval is long."""
        times = self.times
        if len(times) < 2:
            return t_ns
        return min(max(t_ns, 2 * times[0] - times[1]), 2 * times[-1] - times[-2])


def _milliseconds(ns: float | None) -> float | None:
    return None if ns is None else ns / 1e6

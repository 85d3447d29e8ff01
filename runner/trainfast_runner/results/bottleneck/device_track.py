"""Rates over one device's samples, for the throttled time, clocks and energy of any window.

Energy and clocks follow straight lines between two samples. A duration counter gives the throttled time between two
samples; a reason that only one of them shows puts it next to that sample, with that sample's clock loss. Without a
counter a reason holds half way to a sample that does not show it.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from trainfast_runner.machine.telemetry.throttle import CAUSES, REASONS_OF_COUNTER, SAMPLED_REASONS, SOURCES, Cause
from trainfast_runner.records.run_records import DeviceSample
from trainfast_runner.records.tick import DeviceReading

Reading = DeviceSample | DeviceReading
"""A device's sample, read from whole records or from live ticks."""

LEAST_COVERED = 0.5
"""Share of a window that samples must cover for a figure of the whole window."""
ENERGY_FIELD = "energy_mj"
ENERGY_COUNTER, INTEGRATED_POWER = "energy counter", "integrated power"
CHANGING = ("temperature_c", "throttle_reasons", "energy_mj", "power_w", "sm_clock_mhz", "memory_used_bytes")
"""Changing readings that some GPU lacks, but none lacks all of."""
SAMPLES_DROPPED_AT_ONCE = 256
LATE_NS = 1_000_000_000
"""Nanoseconds that a counter may be ahead of the clock: the driver updates it in steps."""
_ENERGY = "energy"


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


class _Rate:
    """A rate over time, constant from one breakpoint to the next; None while it is unknown."""

    def __init__(self) -> None:
        self._ends: list[int] = []
        self._rates: list[float | None] = []
        """The rate up to each of the breakpoints."""
        self._before: float | None = None
        self._after: float | None = None

    def begin(self, t_ns: int) -> None:
        self._ends.append(t_ns)
        self._rates.append(None)

    def grow(self, until_ns: int, rate: float | None) -> None:
        """Go on at `rate` up to this time."""
        if until_ns > self._ends[-1]:
            self._ends.append(until_ns)
            self._rates.append(rate)

    def go_beyond(self, rate: float | None, *, is_first: bool) -> None:
        """Set the rate after the newest sample, and before the first; None: as in the nearest interval."""
        self._before = rate if is_first else self._before
        self._after = rate

    def mean(self, begin_ns: int, end_ns: int, window_ns: int) -> float | None:
        """Mean over the known time between two moments; None if less than `LEAST_COVERED` of the window is known."""
        if len(self._ends) < 2:
            return None
        known_ns, amount, at_ns = 0, 0.0, begin_ns
        for index in range(bisect_right(self._ends, begin_ns), bisect_left(self._ends, end_ns) + 1):
            until_ns = min(end_ns, self._ends[index]) if index < len(self._ends) else end_ns
            if (rate := self._rate(index)) is not None:
                known_ns += until_ns - at_ns
                amount += rate * (until_ns - at_ns)
            at_ns = until_ns
        return None if known_ns <= 0 or known_ns < LEAST_COVERED * window_ns else amount / known_ns

    def forget(self, before_ns: int) -> None:
        """Drop all breakpoints before this one."""
        count = bisect_left(self._ends, before_ns)
        del self._ends[:count], self._rates[:count]
        self._before = None

    def _rate(self, index: int) -> float | None:
        """The rate up to a breakpoint; before the first and after the last one the `go_beyond` rates."""
        if 0 < index < len(self._ends):
            return self._rates[index]
        nearest, beyond = (self._rates[1], self._before) if index == 0 else (self._rates[-1], self._after)
        return nearest if nearest is None or beyond is None else beyond


class Outage(NamedTuple):
    """The time between two answers of a device, and the growth of its counters meanwhile, in nanoseconds by cause.

    `silent_ns` is the first sample without an answer; `back` is False if none came until the last sample.
    """

    begin_ns: int
    silent_ns: int
    end_ns: int
    grown: dict[str, float]
    back: bool = True


class DeviceTrack:
    """One device's rates of throttling, clock and energy between its samples."""

    def __init__(self, uuid: str, keep: int | None, distrusted: frozenset[str]) -> None:
        self.uuid = uuid
        self.index: int | None = None
        self.times: list[int] = []
        self._temperatures: list[float | None] = []
        self._keep, self._distrusted = keep, distrusted
        self._last: Reading | None = None
        self._throttled = {cause.name: _Rate() for cause in CAUSES}
        self._lost = {cause.name: _Rate() for cause in CAUSES}
        self._sources: dict[str, list[int]] = {cause.name: [0] for cause in CAUSES}
        self._clock, self._clock_loss, self._energy = _Rate(), _Rate(), _Rate()
        self._rates = (*self._throttled.values(), *self._lost.values(), self._clock, self._clock_loss, self._energy)
        self._outages: list[Outage] = []
        self._answered: tuple[int, Reading] | None = None
        """The last sample in which the device answered, and when."""
        self._silent_ns: int | None = None
        """The first sample after it without an answer."""
        self._counts_energy = False
        """True if a counter was seen. Power times time never replaces a silent or distrusted counter."""
        self._integrated = [0]
        """1 if the energy up to this sample is power times time."""

    def add(self, t_ns: int, sample: Reading) -> None:
        before = self._last
        if self.times and t_ns <= self.times[-1]:
            return
        self.index = sample.index if self.index is None else self.index
        if before is None:
            for rate in self._rates:
                rate.begin(t_ns)
        else:
            self._grow(before, sample, self.times[-1], t_ns)
        self._note_outage(t_ns, sample)
        self._go_beyond(sample)
        self._last = sample
        self.times.append(t_ns)
        self._temperatures.append(sample.temperature_c)
        if self._keep is not None and len(self.times) > self._keep + SAMPLES_DROPPED_AT_ONCE:
            self._forget(len(self.times) - self._keep)

    def _grow(self, before: Reading, now: Reading, began_ns: int, t_ns: int) -> None:
        """Add the time between two samples. Throttling that only one of them shows is next to that one."""
        ns = t_ns - began_ns
        self._clock.grow(t_ns, _mean_of_ends(reading_of(before, "sm_clock_mhz"), reading_of(now, "sm_clock_mhz")))
        losses = _working_clock_loss(before), _working_clock_loss(now)
        turned_ns: int | None = None
        for cause in CAUSES:
            throttled, lost = self._throttled[cause.name], self._lost[cause.name]
            throttled_ns, source = self._throttled_ns(cause, before, now, ns)
            self._sources[cause.name].append(source)
            share = None if throttled_ns is None else throttled_ns / ns
            first, last = _shows(cause, before), _shows(cause, now)
            if share is not None and first is not None and last is not None and first != last:
                # Throttling began or ended once between the samples: its time is one spell at the end that shows it.
                held_ns = round(min(max(share, 0.0), 1.0) * ns)
                turn_ns = began_ns + held_ns if first else t_ns - held_ns
                turned_ns = turn_ns if turned_ns is None else turned_ns
                if 0 < share < 1:
                    loss = _clock_loss(before if first else now)
                    for until_ns, is_on in ((turn_ns, first), (t_ns, last)):
                        throttled.grow(until_ns, float(is_on))
                        lost.grow(until_ns, _product(float(is_on), loss))
                    continue
            throttled.grow(t_ns, share)
            lost.grow(t_ns, _product(share, _mean_of_ends(_clock_loss(before), _clock_loss(now))))
        # Where throttling began or ended the clock jumped: each side has its own sample's loss, not their mean.
        if turned_ns is None or None in losses:
            self._clock_loss.grow(t_ns, _mean_of_ends(*losses))
        else:
            self._clock_loss.grow(turned_ns, losses[0])
            self._clock_loss.grow(t_ns, losses[1])
        joules, integrated = self._joules(before, now, ns)
        self._energy.grow(t_ns, None if joules is None else joules / ns)
        self._integrated.append(integrated)

    def _joules(self, before: Reading, now: Reading, ns: int) -> tuple[float | None, int]:
        """Energy between two samples in joules, and 1 if it is power times time for want of a counter."""
        first, last = before.energy_mj, now.energy_mj
        self._counts_energy |= first is not None or last is not None
        if ENERGY_FIELD in self._distrusted:
            return None, 0
        # A counter that went back was reset in between, and its difference is no energy.
        if first is not None and last is not None and last >= first:
            return (last - first) / 1e3, 0
        watts = (
            None if self._counts_energy else _mean_of_ends(reading_of(before, "power_w"), reading_of(now, "power_w"))
        )
        return (None, 0) if watts is None else (watts * ns / 1e9, 1)

    def _note_outage(self, t_ns: int, sample: Reading) -> None:
        """Keep the growth of the counters over a time without answers; when they grew is unknown."""
        if not _answers(sample):
            self._silent_ns = t_ns if self._silent_ns is None else self._silent_ns
            return
        before, self._answered = self._answered, (t_ns, sample)
        silent_ns, self._silent_ns = self._silent_ns, None
        if before is None or silent_ns is None:
            return
        ns = t_ns - before[0]
        grown: dict[str, float] = {}
        for cause in CAUSES:
            throttled, source = self._throttled_ns(cause, before[1], sample, ns)
            # Counters run on while nobody reads them; reasons tell only of the moments in which they were read.
            if throttled is not None and source < SOURCES.index(SAMPLED_REASONS) and throttled <= ns + LATE_NS:
                grown[cause.name] = min(throttled, float(ns))
        joules, integrated = self._joules(before[1], sample, ns)
        if joules is not None and not integrated:
            grown[_ENERGY] = joules
        self._outages.append(Outage(before[0], silent_ns, t_ns, grown))

    def outages(self) -> list[Outage]:
        """The times without an answer after a first one, also one that has not ended."""
        if self._answered is None or self._silent_ns is None:
            return self._outages
        return [*self._outages, Outage(self._answered[0], self._silent_ns, self.times[-1], {}, back=False)]

    def _go_beyond(self, sample: Reading) -> None:
        """Take the newest sample for the time after it, and the first one for the time before it."""
        is_first = not self.times
        self._clock_loss.go_beyond(_working_clock_loss(sample), is_first=is_first)
        for cause in CAUSES:
            shown = _shows(cause, sample)
            rate = None if shown is None else float(shown)
            self._throttled[cause.name].go_beyond(rate, is_first=is_first)
            self._lost[cause.name].go_beyond(_product(rate, _clock_loss(sample)), is_first=is_first)

    def _throttled_ns(self, cause: Cause, before: Reading, now: Reading, ns: int) -> tuple[float | None, int]:
        """Throttled nanoseconds between two samples, and the index of their source in `SOURCES`."""
        policy = self._growth(cause.policy_counter, before, now) if cause.policy_counter else None
        grown = [growth for field in cause.reason_counters if (growth := self._growth(field, before, now)) is not None]
        if grown and len(grown) == len(cause.reason_counters):
            return _union_ns(grown, policy, cause, (before, now), ns), 0
        if policy is not None:
            return policy, 1
        if (sampled := _sampled(cause, before, now)) is not None:
            return sampled, 2
        shown = _shows(cause, before), _shows(cause, now)
        return (None, 0) if None in shown else (ns * sum(map(bool, shown)) / 2, 2)

    def _growth(self, field: str, before: Reading, now: Reading) -> float | None:
        first, last = reading_of(before, field), reading_of(now, field)
        if first is None or last is None or last < first or field in self._distrusted:
            return None
        return last - first

    def _forget(self, count: int) -> None:
        columns: tuple[list[Any], ...] = (self.times, self._temperatures, self._integrated, *self._sources.values())
        for column in columns:
            del column[:count]
        for rate in self._rates:
            rate.forget(self.times[0])
        self._outages = [outage for outage in self._outages if outage.end_ns >= self.times[0]]

    def conditions_between(self, begin_ns: int, end_ns: int, *, whole_outages: bool = False) -> DeviceConditions:
        """The conditions between two moments. Time in an outage counts by the counters' growth over the outage.

        With `whole_outages` only outages within the two moments count so: others may not have ended yet.
        """
        begin, end, ns = self._within(begin_ns), self._within(end_ns), end_ns - begin_ns
        outages = [
            (covered, part, outage.grown)
            for outage in self._outages
            if (covered := min(end_ns, outage.end_ns) - max(begin_ns, outage.begin_ns)) > 0
            and ((part := covered / (outage.end_ns - outage.begin_ns)) == 1 or not whole_outages)
        ]

        def amount(rate: _Rate, counter: str, max_rate: float = math.inf) -> float | None:
            """The mean rate times the time; in outages the growth of `counter` instead. None for an unknown rate."""
            mean = rate.mean(begin, end, ns)
            if mean is None:
                return None
            counted = [(covered, part * grown[counter]) for covered, part, grown in outages if counter in grown]
            return min(mean, max_rate) * (ns - sum(covered for covered, _ in counted)) + sum(
                grown for _, grown in counted
            )

        # A counter that catches up on earlier time grows faster than the clock.
        throttled = {name: _milliseconds(amount(rate, name, max_rate=1.0)) for name, rate in self._throttled.items()}
        # The samples around the window: the intervals that they bound overlap it.
        low = max(0, bisect_right(self.times, begin_ns) - 1)
        high = min(bisect_left(self.times, end_ns), len(self.times) - 1)
        joules, integrated = amount(self._energy, _ENERGY), any(self._integrated[low + 1 : high + 1])
        return DeviceConditions(
            index=self.index,
            uuid=self.uuid,
            throttled_ms=throttled,
            lost_ms={name: _milliseconds(amount(rate, "", max_rate=1.0)) for name, rate in self._lost.items()},
            sources={
                name: SOURCES[max(self._sources[name][low + 1 : high + 1], default=0)]
                for name, ms in throttled.items()
                if ms is not None
            },
            clock_loss_fraction=self._clock_loss.mean(begin, end, ns),
            sm_clock_mhz=self._clock.mean(begin, end, ns),
            energy_joules=joules,
            energy_source=None if joules is None else INTEGRATED_POWER if integrated else ENERGY_COUNTER,
            temperature_c=self._temperatures[low] if self.times[low] <= begin_ns else None,
        )

    def _within(self, t_ns: int) -> int:
        """The moment, at most as far outside the samples as the nearest interval is long."""
        times = self.times
        if len(times) < 2:
            return t_ns
        return min(max(t_ns, 2 * times[0] - times[1]), 2 * times[-1] - times[-2])


def _union_ns(
    grown: Sequence[float], policy: float | None, cause: Cause, ends: tuple[Reading, Reading], ns: int
) -> float:
    """Nanoseconds in which any of a cause's reasons held. Reasons may hold at once, and then each counter runs.

    So the time is between the longest counter and the sum: the policy's counter within these bounds, else the longest
    if a sample shows two reasons at once, else the sum.
    """
    low = max(grown)
    high = max(low, min(sum(grown), float(ns)))
    if policy is not None:
        return min(max(policy, low), high)
    both = any(len(cause.reasons & set(sample.throttle_reasons or ())) > 1 for sample in ends)
    return low if both else high


def _sampled(cause: Cause, before: Reading, now: Reading) -> float | None:
    """Nanoseconds summed from looks between two samples; None without any."""
    first, last = (sample.throttled_sampled_ns.get(cause.name) for sample in (before, now))
    return None if first is None or last is None or last < first else float(last - first)


def _shows(cause: Cause, sample: Reading) -> bool | None:
    """True if a sample shows one of the cause's reasons; None without readings of the reasons."""
    return None if sample.throttle_reasons is None else bool(cause.reasons & set(sample.throttle_reasons))


def _clock_loss(sample: Reading) -> float | None:
    """1 - SM clock / its maximum."""
    clock, max_clock = reading_of(sample, "sm_clock_mhz"), reading_of(sample, "sm_clock_max_mhz")
    return max(0.0, 1 - clock / max_clock) if clock is not None and max_clock else None


def _working_clock_loss(sample: Reading) -> float | None:
    """The clock loss of a GPU with work; None of an idle GPU, which lowers its clock to save power."""
    return None if "idle" in (sample.throttle_reasons or ()) else _clock_loss(sample)


def _product(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a * b


def _answers(sample: Reading) -> bool:
    """True if the sample holds any changing reading."""
    return any(getattr(sample, name, None) is not None for name in (*CHANGING, *REASONS_OF_COUNTER))


def reading_of(sample: Reading, field: str) -> float | None:
    """A reading by its name; None when older records or the device lack it."""
    value: float | None = getattr(sample, field, None)
    return value


def _mean_of_ends(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else (a + b) / 2


def _milliseconds(ns: float | None) -> float | None:
    return None if ns is None else ns / 1e6

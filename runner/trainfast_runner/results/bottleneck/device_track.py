"""One device's samples as running totals, from which any stretch of time can be told: throttled, clocks, energy.

Energy and clocks go on straight lines between two samples. A duration counter says how long a stretch between two
samples was throttled, and the reasons sampled at its ends say in which part of it: with them on at one end alone, the
throttled part lies there, and the clock loss in it is the one of that end. Without a counter a reason holds half way to
a sample that does not show it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from trainfast_runner.machine.telemetry.throttle_causes import CAUSES, COUNTERS, SAMPLED_REASONS, SOURCES, Cause
from trainfast_runner.records.run_records import DeviceSample
from trainfast_runner.records.tick import DeviceReading

Seen = DeviceSample | DeviceReading
"""A device's sample as a reader of whole records or of live ticks has it."""

LEAST_COVERED = 0.5
"""Share of a stretch of time that samples must cover before a figure is given for all of it."""
ENERGY_FIELD = "energy_mj"
ENERGY_COUNTER, INTEGRATED_POWER = "energy counter", "integrated power"
SAMPLES_DROPPED_AT_ONCE = 256
LATE_NS = 1_000_000_000
"""By how much a counter may be ahead of the time: the driver brings it up to date in steps."""
_ENERGY = "energy"


class DeviceConditions(msgspec.Struct, frozen=True, kw_only=True):
    """What one device did in a stretch of time. Dictionaries are by cause; what was not measured is None.

    `lost_ms` is throttled time weighed by how far the SM clock was below its maximum meanwhile: an estimate of what
    the throttling cost, right for work that scales with the clock.
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
    """At the start."""


Where = tuple[int, float]
"""A moment as the number of the sample before it and the share of the way to the next one."""
Part = tuple[float, float]
"""The part of the way between two samples in which a quantity grows, as shares of it."""
ALL_OF_IT: Part = (0.0, 1.0)


@dataclass(frozen=True)
class _Turn:
    """Throttling that began or ended between two samples: for which share of the time it held, where that lies, and
    whether it is the first sample that shows it."""

    share: float
    part: Part
    at_first: bool


class _Running:
    """A quantity summed over time, and over how much of the time it was known; both at every sample."""

    def __init__(self) -> None:
        self.amounts = [0.0]
        self.known_ns = [0.0]
        self.parts: list[Part] = [ALL_OF_IT]
        """Where between the sample before and this one it grew."""
        self.beyond: tuple[float | None, float | None] = (None, None)
        """What a nanosecond before the first sample and one after the last adds; None: as in the nearest interval."""

    def add(self, amount: float | None, ns: int, part: Part = ALL_OF_IT) -> None:
        self.amounts.append(self.amounts[-1] + (amount or 0.0))
        self.known_ns.append(self.known_ns[-1] + (0 if amount is None else ns))
        self.parts.append(part)

    def share(self, begin: Where, end: Where, ns: int) -> float | None:
        """The quantity a nanosecond of the known time between two places; None of less than `LEAST_COVERED` of `ns`."""
        known = _at(self.known_ns, *end) - _at(self.known_ns, *begin)
        if known <= 0 or known < LEAST_COVERED * ns:
            return None
        return (self._amount(*end) - self._amount(*begin)) / known

    def _amount(self, place: int, share: float) -> float:
        if len(self.amounts) < 2:
            return self.amounts[0]
        rate = self.beyond[0] if share < 0 else self.beyond[1] if share > 1 else None
        if rate is not None:
            nearest = place if share < 0 else place + 1
            ns = self.known_ns[place + 1] - self.known_ns[place]
            return self.amounts[nearest] + (share if share < 0 else share - 1) * ns * rate
        begin, end = self.parts[place + 1]
        if 0 <= share <= 1 and end > begin:
            share = min(max((share - begin) / (end - begin), 0.0), 1.0)
        return _at(self.amounts, place, share)


def _at(totals: list[float], place: int, share: float) -> float:
    """A running total at a moment, on the straight line through the two samples around it."""
    if len(totals) < 2:
        return totals[0]
    return totals[place] + (totals[place + 1] - totals[place]) * share


class _Outage(NamedTuple):
    """A stretch in which the device did not answer, and what its counters grew by meanwhile, by what is counted."""

    begin_ns: int
    end_ns: int
    grown: dict[str, float]


class DeviceTrack:
    """One device's running totals at each of its samples."""

    def __init__(self, uuid: str, keep: int | None, given_up: frozenset[str]) -> None:
        self.uuid = uuid
        self.index: int | None = None
        self.times: list[int] = []
        self._temperatures: list[float | None] = []
        self._keep, self._given_up = keep, given_up
        self._last: Seen | None = None
        self._throttled = {cause.name: _Running() for cause in CAUSES}
        self._lost = {cause.name: _Running() for cause in CAUSES}
        self._sources: dict[str, list[int]] = {cause.name: [0] for cause in CAUSES}
        self._clock, self._clock_loss, self._energy = _Running(), _Running(), _Running()
        self._clock_turn = _Running()
        """Clock loss in the throttled part of the time that is not in `_clock_loss`."""
        self._outages: list[_Outage] = []
        self._answered: tuple[int, Seen] | None = None
        """The last sample in which the device answered, and when."""
        self._counts_energy = False
        """True if a counter was seen. Power times time never replaces a silent or distrusted counter."""
        self._integrated = [0]
        """1 where the energy up to this sample is power times time."""

    def add(self, t_ns: int, sample: Seen) -> None:
        before = self._last
        if self.times and t_ns <= self.times[-1]:
            return
        self.index = sample.index if self.index is None else self.index
        if before is not None:
            self._grow(before, sample, t_ns - self.times[-1])
        self._see_outage(t_ns, sample)
        self._go_beyond(sample)
        self._last = sample
        self.times.append(t_ns)
        self._temperatures.append(sample.temperature_c)
        if self._keep is not None and len(self.times) > self._keep + SAMPLES_DROPPED_AT_ONCE:
            self._forget(len(self.times) - self._keep)

    def _grow(self, before: Seen, now: Seen, ns: int) -> None:
        clock = _mean(read(before, "sm_clock_mhz"), read(now, "sm_clock_mhz"))
        self._clock.add(None if clock is None else clock * ns, ns)
        turn: _Turn | None = None
        for cause in CAUSES:
            throttled, source = self._throttled_ns(cause, before, now, ns)
            part, meanwhile = _part(cause, before, now, None if throttled is None else throttled / ns)
            self._throttled[cause.name].add(throttled, ns, part)
            turn = turn or _turn(cause, before, now, None if throttled is None else throttled / ns)
            lost = None if throttled is None or meanwhile is None else throttled * meanwhile
            self._lost[cause.name].add(lost, ns, part)
            self._sources[cause.name].append(source)
        self._lose_clock(_working_clock_loss(before), _working_clock_loss(now), turn, ns)
        joules, integrated = self._joules(before, now, ns)
        self._energy.add(joules, ns)
        self._integrated.append(integrated)

    def _joules(self, before: Seen, now: Seen, ns: int) -> tuple[float | None, int]:
        """Energy between two samples in joules, and 1 where it is power times time for want of a counter."""
        first, last = before.energy_mj, now.energy_mj
        self._counts_energy |= first is not None or last is not None
        if ENERGY_FIELD in self._given_up:
            return None, 0
        if first is not None and last is not None and last >= first:
            return (last - first) / 1e3, 0
        watts = None if self._counts_energy else _mean(read(before, "power_w"), read(now, "power_w"))
        return (None, 0) if watts is None else (watts * ns / 1e9, 1)

    def _see_outage(self, t_ns: int, sample: Seen) -> None:
        """When a device that was silent answers again, its counters tell what they did meanwhile, not when."""
        if not _answers(sample):
            return
        before, self._answered = self._answered, (t_ns, sample)
        if before is None or before[0] == self.times[-1]:
            return
        ns = t_ns - before[0]
        grown: dict[str, float] = {}
        for cause in CAUSES:
            throttled, source = self._throttled_ns(cause, before[1], sample, ns)
            if throttled is not None and source < SOURCES.index(SAMPLED_REASONS) and throttled <= ns + LATE_NS:
                grown[cause.name] = min(throttled, float(ns))
        joules, integrated = self._joules(before[1], sample, ns)
        if joules is not None and not integrated:
            grown[_ENERGY] = joules
        self._outages.append(_Outage(before[0], t_ns, grown))

    def _lose_clock(self, first: float | None, last: float | None, turn: _Turn | None, ns: int) -> None:
        """Of an interval in which throttling began or ended the clock falls or rises there, not on a straight line."""
        known = None if first is None or last is None else (first, last)
        if known is None or turn is None:
            mean = _mean(first, last)
            self._clock_loss.add(None if mean is None else mean * ns, ns)
            self._clock_turn.add(0.0, ns)
            return
        held, free = known if turn.at_first else known[::-1]
        self._clock_loss.add(free * ns, ns)
        self._clock_turn.add((held - free) * turn.share * ns, ns, turn.part)

    def _go_beyond(self, sample: Seen) -> None:
        """What the newest sample says of the time after it, and the first one of the time before it."""
        loss, working = _clock_loss(sample), _working_clock_loss(sample)
        for running, says in ((self._clock_loss, working), (self._clock_turn, 0.0)):
            running.beyond = (running.beyond[0] if self.times else says, says)
        for cause in CAUSES:
            shown = _shows(cause, sample)
            rate = None if shown is None else float(shown)
            for runnings, says in ((self._throttled, rate), (self._lost, _product(rate, loss))):
                running = runnings[cause.name]
                running.beyond = (running.beyond[0] if self.times else says, says)

    def _throttled_ns(self, cause: Cause, before: Seen, now: Seen, ns: int) -> tuple[float | None, int]:
        """Throttled nanoseconds between two samples, and the place in `SOURCES` of what says so."""
        policy = self._growth(cause.policy_counter, before, now) if cause.policy_counter else None
        grown = [growth for field in cause.reason_counters if (growth := self._growth(field, before, now)) is not None]
        if grown and len(grown) == len(cause.reason_counters):
            return _together(grown, policy, cause, (before, now), ns), 0
        if policy is not None:
            return policy, 1
        if (sampled := _sampled(cause, before, now)) is not None:
            return sampled, 2
        shown = _shows(cause, before), _shows(cause, now)
        return (None, 0) if None in shown else (ns * sum(map(bool, shown)) / 2, 2)

    def _growth(self, field: str, before: Seen, now: Seen) -> float | None:
        first, last = read(before, field), read(now, field)
        if first is None or last is None or last < first or field in self._given_up:
            return None
        return last - first

    def _forget(self, count: int) -> None:
        others = (self._clock, self._clock_loss, self._clock_turn, self._energy)
        columns: list[list[Any]] = [self.times, self._temperatures, self._integrated, *self._sources.values()]
        for running in (*self._throttled.values(), *self._lost.values(), *others):
            columns += [running.amounts, running.known_ns, running.parts]
            running.beyond = (None, running.beyond[1])
        for column in columns:
            del column[:count]
        self._outages = [outage for outage in self._outages if outage.end_ns >= self.times[0]]

    def between(self, begin_ns: int, end_ns: int, *, whole_outages: bool = False) -> DeviceConditions:
        """What it did in that time. Of an outage its part counts as the counters say of it all, not by the rest;
        with `whole_outages` only if it lies in that time: the end of another may not be known yet."""
        begin, end, ns = self._where(begin_ns), self._where(end_ns), end_ns - begin_ns
        outages = [
            (covered, part, one.grown)
            for one in self._outages
            if (covered := min(end_ns, one.end_ns) - max(begin_ns, one.begin_ns)) > 0
            and ((part := covered / (one.end_ns - one.begin_ns)) == 1 or not whole_outages)
        ]

        def share(running: _Running) -> float | None:
            return running.share(begin, end, ns)

        def over_time(name: str, one: float | None) -> float | None:
            if one is None:
                return None
            told = [(covered, part * grown[name]) for covered, part, grown in outages if name in grown]
            return one * (ns - sum(covered for covered, _ in told)) + sum(grown for _, grown in told)

        def milliseconds(of: dict[str, _Running], *, by_counter: bool) -> dict[str, float | None]:
            found: dict[str, float | None] = {}
            for name, running in of.items():
                one = share(running)
                # A counter that catches up on an earlier stretch grows faster than the time.
                one = None if one is None else min(1.0, one)
                all_ns = over_time(name if by_counter else "", one)
                found[name] = None if all_ns is None else all_ns / 1e6
            return found

        throttled = milliseconds(self._throttled, by_counter=True)
        low = max(0, bisect_right(self.times, begin_ns) - 1)
        high = min(bisect_left(self.times, end_ns), len(self.times) - 1)
        joules = over_time(_ENERGY, share(self._energy))
        return DeviceConditions(
            index=self.index,
            uuid=self.uuid,
            throttled_ms=throttled,
            lost_ms=milliseconds(self._lost, by_counter=False),
            sources={
                name: SOURCES[max(self._sources[name][low + 1 : high + 1], default=0)]
                for name, ms in throttled.items()
                if ms is not None
            },
            clock_loss_fraction=_sum(share(self._clock_loss), share(self._clock_turn)),
            sm_clock_mhz=share(self._clock),
            energy_joules=joules,
            energy_source=None if joules is None else self._energy_source(low, high),
            temperature_c=self._temperatures[low] if self.times[low] <= begin_ns else None,
        )

    def _energy_source(self, low: int, high: int) -> str:
        return INTEGRATED_POWER if any(self._integrated[low + 1 : high + 1]) else ENERGY_COUNTER

    def _where(self, t_ns: int) -> Where:
        """A moment as the sample before it and the share of the way to the next one.

        Before the first and after the last sample it goes on for as long again as the nearest interval.
        """
        if len(self.times) < 2:
            return 0, 0.0
        place = min(max(bisect_right(self.times, t_ns) - 1, 0), len(self.times) - 2)
        t0, t1 = self.times[place], self.times[place + 1]
        return place, min(max((t_ns - t0) / (t1 - t0), -1.0), 2.0)


def _together(grown: Sequence[float], policy: float | None, cause: Cause, ends: tuple[Seen, Seen], ns: int) -> float:
    """How long any of a cause's reasons held: they may hold at once, and then each one's counter runs.

    That is between the longest and the sum. Within it the counter of the policy tells, else whether a sample shows
    two reasons at the same time.
    """
    low = max(grown)
    high = max(low, min(sum(grown), float(ns)))
    if policy is not None:
        return min(max(policy, low), high)
    both = any(len(cause.reasons & set(sample.throttle_reasons or ())) > 1 for sample in ends)
    return low if both else high


def _part(cause: Cause, before: Seen, now: Seen, share: float | None) -> tuple[Part, float | None]:
    """Where between two samples the throttled share of the time lies, and the clock loss in it."""
    first, last = _shows(cause, before), _shows(cause, now)
    loss = _mean(_clock_loss(before), _clock_loss(now))
    if share is None or not 0 < share < 1 or None in (first, last) or first == last:
        return ALL_OF_IT, loss
    ours = _clock_loss(before if first else now)
    return (0.0, share) if first else (1 - share, 1.0), loss if ours is None else ours


def _turn(cause: Cause, before: Seen, now: Seen, share: float | None) -> _Turn | None:
    """None where both samples show the cause's reasons, or neither, or nothing tells how long they held."""
    first, last = _shows(cause, before), _shows(cause, now)
    if share is None or first is None or last is None or first == last:
        return None
    share = min(max(share, 0.0), 1.0)
    return _Turn(share, (0.0, share) if first else (1 - share, 1.0), first)


def _sampled(cause: Cause, before: Seen, now: Seen) -> float | None:
    """What looks between two samples add up to, where there were any."""
    first, last = (sample.throttled_sampled_ns.get(cause.name) for sample in (before, now))
    return None if first is None or last is None or last < first else float(last - first)


def _shows(cause: Cause, sample: Seen) -> bool | None:
    """Whether a sample shows one of the cause's reasons; None where it shows none at all."""
    return None if sample.throttle_reasons is None else bool(cause.reasons & set(sample.throttle_reasons))


def _clock_loss(sample: Seen) -> float | None:
    """1 - SM clock / its maximum."""
    clock, most = read(sample, "sm_clock_mhz"), read(sample, "sm_clock_max_mhz")
    return max(0.0, 1 - clock / most) if clock is not None and most else None


def _working_clock_loss(sample: Seen) -> float | None:
    """The same of a GPU that has work: an idle one lowers its clock to save power, and loses nothing by it."""
    return None if "idle" in (sample.throttle_reasons or ()) else _clock_loss(sample)


def _sum(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else max(0.0, a + b)


def _product(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a * b


def _answers(sample: Seen) -> bool:
    """Whether it holds anything that changes."""
    names = ("temperature_c", "throttle_reasons", "energy_mj", "power_w", "sm_clock_mhz", *COUNTERS)
    return any(getattr(sample, name, None) is not None for name in names)


def read(sample: Seen, field: str) -> float | None:
    """A reading by its name; older records, and a sampler that does not ask for it, lack it."""
    value: float | None = getattr(sample, field, None)
    return value


def _mean(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else (a + b) / 2

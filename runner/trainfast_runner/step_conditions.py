"""What the devices did while each step ran: throttled time by cause, clocks, energy, temperature.

Steps and device samples share CLOCK_MONOTONIC. Counters grow on straight lines between two samples, and a sampled
throttle reason holds until the next sample. Nothing is stored: the live view, `runs show --steps` and the summary feed
the same `StepJoin` from the same two files.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from trainfast_runner.records import Step
from trainfast_runner.run_records import DeviceSample
from trainfast_runner.telemetry.readings import DeviceReading

Seen = DeviceSample | DeviceReading
"""A device's sample as a reader of whole records or of live ticks has it."""

LEAST_COVERED = 0.5
"""Share of a stretch of time that samples must cover before a figure is given for all of it."""
REASON_COUNTER, POLICY_COUNTER, SAMPLED_REASONS = "reason counter", "policy counter", "sampled reasons"
SOURCES = (REASON_COUNTER, POLICY_COUNTER, SAMPLED_REASONS)
"""Where a throttled time comes from, the most exact first: the driver's counter of that very reason, its counter of
the policy (fields 74 to 76 of nvml.h), or the reasons as they were sampled, each standing until the next sample."""
ENERGY_COUNTER, INTEGRATED_POWER = "energy counter", "integrated power"
SAMPLES_DROPPED_AT_ONCE = 256


@dataclass(frozen=True)
class Cause:
    """Why a device runs below its clocks: the counters (nanoseconds) and the reasons that say so."""

    name: str
    words: str
    reason_counters: tuple[str, ...]
    policy_counter: str | None
    reasons: frozenset[str]


CAUSES = (
    Cause(
        "thermal",
        "heat",
        ("sw_thermal_slowdown_ns", "hw_thermal_slowdown_ns"),
        "thermal_violation_ns",
        frozenset(("sw_thermal", "hw_thermal")),
    ),
    Cause("power", "the power limit", ("sw_power_cap_ns",), "power_violation_ns", frozenset(("sw_power_cap",))),
    Cause("brake", "the power brake", ("hw_power_brake_ns",), None, frozenset(("hw_power_brake",))),
    Cause("sync_boost", "its sync-boost group", (), "sync_boost_violation_ns", frozenset(("sync_boost",))),
)
"""Every cause that is joined to steps, under the names that records use."""
COUNTERS = tuple(
    field for cause in CAUSES for field in (*cause.reason_counters, cause.policy_counter) if field is not None
)


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
    """1 - SM clock / maximum SM clock, the mean over the time."""
    sm_clock_mhz: float | None = None
    energy_joules: float | None = None
    energy_source: str | None = None
    temperature_c: float | None = None
    """At the start."""


class StepConditions(msgspec.Struct, frozen=True, kw_only=True):
    """One step beside what the watched devices did meanwhile: of each cause and clock loss the worst device, energy
    of all together (a sample's share counts every data-parallel rank), the hottest at the step's start."""

    step: int
    t_ns: int
    throttled_ms: dict[str, float | None] = {}
    sources: dict[str, str] = {}
    clock_loss_fraction: float | None = None
    energy_joules: float | None = None
    joules_per_sample: float | None = None
    temperature_c: float | None = None
    devices: tuple[DeviceConditions, ...] = ()


class StepJoin:
    """Joins steps to the samples of some devices as both come in. Feed samples in the order of their time.

    `samples_factor` turns a step's samples into those of the whole run: its data-parallel degree. `keep` bounds how
    many samples of a device stay in memory, `keep_steps` how many steps wait; None keeps all. `given_up` names
    counters by UUID that are not to be believed.
    """

    def __init__(
        self,
        uuids: Sequence[str],
        *,
        samples_factor: float = 1.0,
        keep: int | None = None,
        keep_steps: int | None = None,
        given_up: dict[str, frozenset[str]] | None = None,
    ) -> None:
        self._tracks = {uuid: _Track(uuid, keep, (given_up or {}).get(uuid, frozenset())) for uuid in uuids}
        self._samples_factor = samples_factor
        self._waiting: deque[Step] = deque(maxlen=keep_steps)
        self._seen_ns: int | None = None

    def see(self, t_ns: int, devices: Iterable[Seen]) -> None:
        """Take one tick."""
        self._seen_ns = t_ns
        for sample in devices:
            track = self._tracks.get(sample.uuid or "")
            if track is not None:
                track.add(t_ns if sample.t_ns is None else sample.t_ns, sample)

    def add(self, step: Step) -> None:
        """Take a step of rank 0; it is joined when a tick after its end has come."""
        if self._tracks:
            self._waiting.append(step)

    def joined(self, *, final: bool = False) -> list[StepConditions]:
        """The steps that have become known since the last call; `final`: no more samples will come."""
        found = []
        while self._waiting and (final or (self._seen_ns is not None and self._waiting[0].t_ns <= self._seen_ns)):
            found.append(self._of(self._waiting.popleft()))
        return found

    def window(self, begin_ns: int, end_ns: int) -> list[DeviceConditions]:
        """What each device with samples did between two moments, in the order they were named."""
        return [track.between(begin_ns, end_ns) for track in self._tracks.values() if track.times]

    def _of(self, step: Step) -> StepConditions:
        devices = self.window(step.t_ns - round(step.step_ms * 1e6), step.t_ns)
        energies = [device.energy_joules for device in devices]
        joules = sum(energy for energy in energies if energy is not None) if energies and None not in energies else None
        samples = step.samples * self._samples_factor
        return StepConditions(
            step=step.step,
            t_ns=step.t_ns,
            throttled_ms={
                cause.name: _most(device.throttled_ms.get(cause.name) for device in devices) for cause in CAUSES
            },
            sources=_least_exact(devices),
            clock_loss_fraction=_most(device.clock_loss_fraction for device in devices),
            energy_joules=joules,
            joules_per_sample=joules / samples if joules is not None and samples else None,
            temperature_c=_most(device.temperature_c for device in devices),
            devices=tuple(devices),
        )


def join_of(
    devices: Mapping[str, Sequence[tuple[int, DeviceSample]]], uuids: Sequence[str], samples_factor: float
) -> StepJoin:
    """A `StepJoin` that has seen all samples of ended records; counters the sampler gave up on are left out whole."""
    given_up = {uuid: _given_up([sample for _, sample in samples]) for uuid, samples in devices.items()}
    join = StepJoin(uuids, samples_factor=samples_factor, given_up=given_up)
    for t_ns, sample in sorted(
        ((t_ns, sample) for uuid in uuids for t_ns, sample in devices.get(uuid, ())), key=lambda seen: seen[0]
    ):
        join.see(t_ns, (sample,))
    return join


def _given_up(samples: Sequence[Seen]) -> frozenset[str]:
    """Counters that were there and are missing from the last sample in which the device answered at all."""
    answered = [sample for sample in samples if sample.temperature_c is not None or sample.throttle_reasons is not None]
    if not answered:
        return frozenset()
    return frozenset(
        field
        for field in COUNTERS
        if _read(answered[-1], field) is None and any(_read(sample, field) is not None for sample in answered)
    )


class _Running:
    """A quantity summed over time, and over how much of the time it was known; both at every sample."""

    def __init__(self) -> None:
        self.amounts = [0.0]
        self.known_ns = [0.0]

    def add(self, amount: float | None, ns: int) -> None:
        self.amounts.append(self.amounts[-1] + (amount or 0.0))
        self.known_ns.append(self.known_ns[-1] + (0 if amount is None else ns))

    def share(self, begin: tuple[int, float], end: tuple[int, float], ns: int) -> float | None:
        """The quantity a nanosecond of the known time between two places; None of less than `LEAST_COVERED` of `ns`."""
        known = _at(self.known_ns, *end) - _at(self.known_ns, *begin)
        if known <= 0 or known < LEAST_COVERED * ns:
            return None
        return (_at(self.amounts, *end) - _at(self.amounts, *begin)) / known


def _at(totals: list[float], place: int, share: float) -> float:
    """A running total at a moment, on the straight line through the two samples around it."""
    if len(totals) < 2:
        return totals[0]
    return totals[place] + (totals[place + 1] - totals[place]) * share


class _Track:
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
        self._integrated = [0]
        """1 where the energy up to this sample is power times time."""

    def add(self, t_ns: int, sample: Seen) -> None:
        before = self._last
        if self.times and t_ns <= self.times[-1]:
            return
        self.index = sample.index if self.index is None else self.index
        if before is not None:
            self._grow(before, sample, t_ns - self.times[-1])
        self._last = sample
        self.times.append(t_ns)
        self._temperatures.append(sample.temperature_c)
        if self._keep is not None and len(self.times) > self._keep + SAMPLES_DROPPED_AT_ONCE:
            self._forget(len(self.times) - self._keep)

    def _grow(self, before: Seen, now: Seen, ns: int) -> None:
        clock = _mean(_read(before, "sm_clock_mhz"), _read(now, "sm_clock_mhz"))
        most = _read(now, "sm_clock_max_mhz")
        loss = max(0.0, 1 - clock / most) if clock is not None and most else None
        self._clock.add(None if clock is None else clock * ns, ns)
        self._clock_loss.add(None if loss is None else loss * ns, ns)
        for cause in CAUSES:
            throttled, source = self._throttled_ns(cause, before, now, ns)
            self._throttled[cause.name].add(throttled, ns)
            self._lost[cause.name].add(None if throttled is None or loss is None else throttled * loss, ns)
            self._sources[cause.name].append(source)
        joules, integrated = _joules(before, now, ns)
        self._energy.add(joules, ns)
        self._integrated.append(integrated)

    def _throttled_ns(self, cause: Cause, before: Seen, now: Seen, ns: int) -> tuple[float | None, int]:
        """Throttled nanoseconds between two samples, and the place in `SOURCES` of what says so."""
        grown = [growth for field in cause.reason_counters if (growth := self._growth(field, before, now)) is not None]
        if grown and len(grown) == len(cause.reason_counters):
            return sum(grown), 0
        if cause.policy_counter and (growth := self._growth(cause.policy_counter, before, now)) is not None:
            return growth, 1
        if before.throttle_reasons is None:
            return None, 2
        return (float(ns) if cause.reasons & set(before.throttle_reasons) else 0.0), 2

    def _growth(self, field: str, before: Seen, now: Seen) -> float | None:
        first, last = _read(before, field), _read(now, field)
        if first is None or last is None or last < first or field in self._given_up:
            return None
        return last - first

    def _forget(self, count: int) -> None:
        runnings = (*self._throttled.values(), *self._lost.values(), self._clock, self._clock_loss, self._energy)
        columns: list[list[Any]] = [self.times, self._temperatures, self._integrated, *self._sources.values()]
        for running in runnings:
            columns += [running.amounts, running.known_ns]
        for column in columns:
            del column[:count]

    def between(self, begin_ns: int, end_ns: int) -> DeviceConditions:
        begin, end, ns = self._where(begin_ns), self._where(end_ns), end_ns - begin_ns

        def share(running: _Running) -> float | None:
            return running.share(begin, end, ns)

        def milliseconds(of: dict[str, _Running]) -> dict[str, float | None]:
            # A counter that catches up on an earlier stretch grows faster than the time.
            shares = {name: share(running) for name, running in of.items()}
            return {name: None if one is None else min(1.0, one) * ns / 1e6 for name, one in shares.items()}

        throttled = milliseconds(self._throttled)
        low = max(0, bisect_right(self.times, begin_ns) - 1)
        high = min(bisect_left(self.times, end_ns), len(self.times) - 1)
        joules_per_ns = share(self._energy)
        return DeviceConditions(
            index=self.index,
            uuid=self.uuid,
            throttled_ms=throttled,
            lost_ms=milliseconds(self._lost),
            sources={
                name: SOURCES[max(self._sources[name][low + 1 : high + 1], default=0)]
                for name, ms in throttled.items()
                if ms is not None
            },
            clock_loss_fraction=share(self._clock_loss),
            sm_clock_mhz=share(self._clock),
            energy_joules=None if joules_per_ns is None else joules_per_ns * ns,
            energy_source=None if joules_per_ns is None else self._energy_source(low, high),
            temperature_c=self._temperatures[low] if self.times[low] <= begin_ns else None,
        )

    def _energy_source(self, low: int, high: int) -> str:
        return INTEGRATED_POWER if any(self._integrated[low + 1 : high + 1]) else ENERGY_COUNTER

    def _where(self, t_ns: int) -> tuple[int, float]:
        """A moment as the sample before it and the share of the way to the next one.

        Before the first and after the last sample the line goes on for as long again as the nearest interval.
        """
        if len(self.times) < 2:
            return 0, 0.0
        place = min(max(bisect_right(self.times, t_ns) - 1, 0), len(self.times) - 2)
        t0, t1 = self.times[place], self.times[place + 1]
        return place, min(max((t_ns - t0) / (t1 - t0), -1.0), 2.0)


def _joules(before: Seen, now: Seen, ns: int) -> tuple[float | None, int]:
    """Energy between two samples in joules, and 1 where it is power times time for want of a counter."""
    first, last = before.energy_mj, now.energy_mj
    if first is not None and last is not None and last >= first:
        return (last - first) / 1e3, 0
    watts = _mean(_read(before, "power_w"), _read(now, "power_w"))
    return (None if watts is None else watts * ns / 1e9), 1


def _read(sample: Seen, field: str) -> float | None:
    """A reading by its name; older records, and a sampler that does not ask for it, lack it."""
    value: float | None = getattr(sample, field, None)
    return value


def _mean(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else (a + b) / 2


def _most(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _least_exact(devices: Sequence[DeviceConditions]) -> dict[str, str]:
    return {
        cause.name: max((device.sources[cause.name] for device in told), key=SOURCES.index)
        for cause in CAUSES
        if (told := [device for device in devices if cause.name in device.sources])
    }

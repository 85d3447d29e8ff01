"""The devices' conditions over time, joined to the steps: throttled time, clocks, energy, temperature and outages.

Steps and device samples share CLOCK_MONOTONIC. Nothing is stored: the live view, `runs show --steps` and the summary
feed the same `StepJoin` from the same two files. Between two answers of a device every rate is constant: a counter's
growth is spread evenly over the time between, and a throttle reason without a counter holds until the next sample.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

import msgspec

from trainfast_runner.errors import highest
from trainfast_runner.machine.telemetry.throttle import CAUSES, REASONS_OF_COUNTER, Cause
from trainfast_runner.records.run_lines import Step
from trainfast_runner.records.tick import DeviceReading, TimedReadings

ENERGY_COUNTER, INTEGRATED_POWER = "energy counter", "integrated power"
MIN_COVERED = 0.5
"""Share of a window that samples must cover for a figure of the whole window."""
LATE_NS, ROUNDING_NS = 1_000_000_000, 1_000_000
"""Nanoseconds that a counter may be ahead of the clock, since the driver updates it in steps, and that it may step
back by, since it is kept in coarser units or in floating point (chosen, not measured)."""
LONGEST_GAP_NS = 300_000_000_000
"""Chosen, not measured: the time between two samples beyond which the cap of the records has dropped some."""
_ANSWERS = (
    *("temperature_c", "throttle_reasons", "energy_mj", "power_w", "sm_clock_mhz", "memory_used_bytes"),
    *REASONS_OF_COUNTER,
)
"""Readings that change from tick to tick, and duration counters: a GPU that answers gives at least one."""

_MAX_APART, _MIN_JOULES = 2.0, 10.0
"""Chosen, not measured: the factor between the energy counter and power times time from which neither is believed, and
the energy below which they are not compared: half a second of a GPU at rest."""
_STILL_S, _MIN_GROWING_S = 0.5, 10.0
"""Seconds after which a counter is judged: the driver updates one that stands still several times as often, and the
power beside a growing one is an average over a second at best."""


@dataclass(frozen=True)
class Window:
    """The span of the measured steps, CLOCK_MONOTONIC nanoseconds."""

    begin_ns: int
    end_ns: int

    @property
    def ms(self) -> float:
        """Length of the window in milliseconds."""
        return (self.end_ns - self.begin_ns) / 1e6


def window_of(steps: Sequence[Step]) -> Window | None:
    """The time from the start of the first step to the end of the last; None without any."""
    if not steps:
        return None
    begin_ns = steps[0].begin_ns
    return Window(begin_ns, steps[-1].t_ns) if steps[-1].t_ns > begin_ns else None


class DeviceConditions(msgspec.Struct, frozen=True, kw_only=True):
    """Throttling, clocks and energy of one device in a window. Dictionaries are by cause; None was not measured.

    `lost_ms` is throttled time times the loss of SM clock meanwhile: an estimate of the throttling's cost, right for
    work that scales with the clock. None for a device that the run only watches: no step waits for it.
    """

    index: int | None = None
    uuid: str | None = None
    throttled_ms: dict[str, float | None] = {}
    lost_ms: dict[str, float | None] = {}
    clock_loss_fraction: float | None = None
    """1 - SM clock / maximum SM clock, the mean over the time in which the GPU was not idle."""
    sm_clock_mhz: float | None = None
    energy_joules: float | None = None
    energy_source: str | None = None
    energy_reason: str | None = None
    """The reason that the energy counter gives no figure: it disagrees with the power."""
    temperature_c: float | None = None
    """Temperature at the start of the window."""


class StepConditions(msgspec.Struct, frozen=True, kw_only=True):
    """The watched devices' conditions in one step.

    Throttling and clock loss are the worst device's, energy the sum, temperature the hottest at the step's start.
    """

    step: int
    t_ns: int
    throttled_ms: dict[str, float | None] = {}
    clock_loss_fraction: float | None = None
    energy_joules: float | None = None
    joules_per_sample: float | None = None
    temperature_c: float | None = None
    devices: tuple[DeviceConditions, ...] = ()


class Outage(NamedTuple):
    """The time between two answers of a device."""

    begin_ns: int
    silent_ns: int
    """Time of the first sample without an answer."""
    end_ns: int
    back: bool = True
    """False if no answer came until the last sample."""


def _clock_loss(sample: DeviceReading) -> float | None:
    """1 - SM clock / its maximum."""
    clock, max_clock = sample.sm_clock_mhz, sample.sm_clock_max_mhz
    return max(0.0, 1 - clock / max_clock) if clock is not None and max_clock else None


def _working_clock_loss(sample: DeviceReading) -> float | None:
    """The clock loss of a GPU with work; None of an idle GPU, which lowers its clock to save power."""
    return None if "idle" in (sample.throttle_reasons or ()) else _clock_loss(sample)


def _mean(first: float | None, last: float | None) -> float | None:
    return None if first is None or last is None else (first + last) / 2


def quotient(value: float | None, by: float) -> float | None:
    """The value divided by a number; None if it is unknown."""
    return None if value is None else value / by


def _growth(field: str, earlier: DeviceReading, later: DeviceReading, ns: int) -> float | None:
    """Growth of a duration counter; None if it was reset in between, or ran ahead of the clock and is no duration."""
    first: int | None = getattr(earlier, field, None)
    last: int | None = getattr(later, field, None)
    if first is None or last is None or not -ROUNDING_NS < last - first <= ns + LATE_NS:
        return None
    return max(0.0, last - first)


def _counted_ns(cause: Cause, earlier: DeviceReading, later: DeviceReading, ns: int) -> float | None:
    """Nanoseconds throttled by the driver's counters of the reasons, or else of the policy; None without any."""
    policy_ns = _growth(cause.policy_counter, earlier, later, ns) if cause.policy_counter else None
    grown_ns = [growth for field in cause.reason_counters if (growth := _growth(field, earlier, later, ns)) is not None]
    if not grown_ns or len(grown_ns) < len(cause.reason_counters):
        return policy_ns
    # Reasons may hold at once, and then each counter runs: the time is between the longest counter and the sum.
    low_ns = max(grown_ns)
    high_ns = max(low_ns, min(sum(grown_ns), float(ns)))
    return high_ns if policy_ns is None else min(max(policy_ns, low_ns), high_ns)


_THROTTLED, _LOST = ({cause.name: f"{kind} {cause.name}" for cause in CAUSES} for kind in ("throttled", "lost"))
"""The rates of each cause: the throttled share of the time, and that share times the loss of SM clock meanwhile."""
_RATES = (*_THROTTLED.values(), *_LOST.values(), "clock", "clock loss", "energy", "dropped", "counted", "integrated")
"""The rates that are summed; `dropped` is 1 where the cap of the records left samples out. The last two are energy by
the counter and by power times time where both are known, to check one by the other."""
_Moment = tuple[int, float]
"""The sample after a moment, and the part of the time from the sample before: beyond the samples below 0 or over 1,
where the nearest rate goes on."""


class DeviceTrack:
    """One device's answers in the order of their time, and its conditions between any two moments.

    `keep` samples stay in memory, up to twice as many before the older half is dropped; None keeps all. `is_used` is
    False for a device that the run only watches.
    """

    def __init__(self, uuid: str, keep: int | None = None, *, is_used: bool = True) -> None:
        self.uuid = uuid
        self._is_used = is_used
        self.index: int | None = None
        self.times: list[int] = []
        self._keep = keep
        self._last: DeviceReading | None = None
        self._temperatures: list[float | None] = []
        self._sums: dict[str, list[tuple[int, float]]] = {name: [(0, 0.0)] for name in _RATES}
        """The nanoseconds in which each rate is known up to each answer, and the rate summed over them."""
        self._counts_energy = False
        """True if a counter was seen. Power times time never replaces a silent counter."""
        self._silent_ns: int | None = None
        self._newest_ns = 0
        """Times of the first sample without an answer since the last one, and of the newest sample."""
        self._ended_outages: list[Outage] = []

    def add(self, t_ns: int, sample: DeviceReading) -> None:
        """Take the sample at `t_ns` (CLOCK_MONOTONIC); one that is no newer than the last is left out."""
        if self.times and t_ns <= self._newest_ns:
            return
        self._newest_ns = t_ns
        self.index = sample.index if self.index is None else self.index
        if not any(getattr(sample, name, None) is not None for name in _ANSWERS):
            self._silent_ns = t_ns if self._silent_ns is None else self._silent_ns
            return
        if self._last is not None:
            ns = t_ns - self.times[-1]
            rates = self._rates(self._last, sample, ns)
            for name, sums in self._sums.items():
                (known_ns, total), rate = sums[-1], rates[name]
                sums.append((known_ns, total) if rate is None else (known_ns + ns, total + rate * ns))
            if self._silent_ns is not None:
                self._ended_outages.append(Outage(self.times[-1], self._silent_ns, t_ns))
        self._last, self._silent_ns = sample, None
        self.times.append(t_ns)
        self._temperatures.append(sample.temperature_c)
        if self._keep is not None and len(self.times) > 2 * self._keep:
            del self.times[: -self._keep], self._temperatures[: -self._keep]
            for sums in self._sums.values():
                del sums[: -self._keep]

    def _rates(self, earlier: DeviceReading, later: DeviceReading, ns: int) -> dict[str, float | None]:
        """The rates between two answers. The counters tell of an outage in between, the readings do not."""
        was_silent = self._silent_ns is not None or ns > LONGEST_GAP_NS
        rates: dict[str, float | None] = {}
        for cause in CAUSES:
            share = quotient(_counted_ns(cause, earlier, later, ns), ns)
            loss = _mean(_clock_loss(earlier), _clock_loss(later))
            if share is None and not was_silent and None not in (earlier.throttle_reasons, later.throttle_reasons):
                share = float(not cause.reasons.isdisjoint(earlier.throttle_reasons or ()))
                loss = _clock_loss(earlier)
            rates[_THROTTLED[cause.name]] = share
            rates[_LOST[cause.name]] = None if share is None or loss is None or was_silent else share * loss
        first_mj, last_mj, counted = earlier.energy_mj, later.energy_mj, None
        if first_mj is not None and last_mj is not None and last_mj >= first_mj:  # not reset in between
            counted = (last_mj - first_mj) / 1e3 / ns
        power = None if was_silent else quotient(_mean(earlier.power_w, later.power_w), 1e9)
        self._counts_energy |= earlier.energy_mj is not None or later.energy_mj is not None
        return rates | {
            "clock": None if was_silent else _mean(earlier.sm_clock_mhz, later.sm_clock_mhz),
            "clock loss": None if was_silent else _mean(_working_clock_loss(earlier), _working_clock_loss(later)),
            "energy": counted if self._counts_energy else power,
            "dropped": float(self._silent_ns is None and ns > LONGEST_GAP_NS),
            "counted": None if power is None else counted,
            "integrated": None if counted is None else power,
        }

    def outages(self) -> list[Outage]:
        """The times without an answer after a first one, also one that has not ended by the newest sample."""
        if not self.times or self._silent_ns is None:
            return self._ended_outages
        return [*self._ended_outages, Outage(self.times[-1], self._silent_ns, self._newest_ns, back=False)]

    def _energy_doubt(self) -> str | None:
        """The reason to distrust the energy counter: it and power times time are far apart over all samples together.

        Then neither is a measurement. None if both agree, or if too little was measured.
        """
        counted, integrated = self._sums["counted"], self._sums["integrated"]
        seconds = (counted[-1][0] - counted[0][0]) / 1e9
        counted_j, integrated_j = counted[-1][1] - counted[0][1], integrated[-1][1] - integrated[0][1]
        smaller_j, larger_j = sorted((counted_j, integrated_j))
        enough_s = _STILL_S if counted_j == 0 else _MIN_GROWING_S
        if seconds < enough_s or larger_j < _MIN_JOULES or larger_j <= _MAX_APART * smaller_j:
            return None
        return (
            f"the energy counter shows {counted_j:,.0f} J in {seconds:.1f} s,"
            f" but {integrated_j / seconds:,.0f} W over that time are {integrated_j:,.0f} J"
        )

    def conditions_between(self, begin_ns: int, end_ns: int) -> DeviceConditions:
        """The conditions between two moments, at least one answer known."""
        begin, end, ns = self._moment(begin_ns), self._moment(end_ns), end_ns - begin_ns

        def mean(name: str) -> float | None:
            """The mean rate; None if less than `MIN_COVERED` of the recorded time is known."""
            (known_before_ns, before), (known_after_ns, after) = self._sum_at(name, begin), self._sum_at(name, end)
            known_ns = known_after_ns - known_before_ns
            return (after - before) / known_ns if known_ns > 0 and known_ns >= MIN_COVERED * recorded_ns else None

        recorded_ns = ns - (self._sum_at("dropped", end)[1] - self._sum_at("dropped", begin)[1])

        def ms(name: str) -> float | None:
            """The milliseconds of a share of the time; a counter that catches up on earlier time outruns the clock."""
            share = mean(name)
            return None if share is None else min(share, 1.0) * ns / 1e6

        first_index = max(0, bisect_right(self.times, begin_ns) - 1)
        doubt, watts = self._energy_doubt(), mean("energy")
        joules = None if doubt or watts is None else watts * ns
        return DeviceConditions(
            index=self.index,
            uuid=self.uuid,
            throttled_ms={cause: ms(name) for cause, name in _THROTTLED.items()},
            lost_ms={cause: ms(name) if self._is_used else None for cause, name in _LOST.items()},
            clock_loss_fraction=mean("clock loss"),
            sm_clock_mhz=mean("clock"),
            energy_joules=joules,
            energy_source=None if joules is None else ENERGY_COUNTER if self._counts_energy else INTEGRATED_POWER,
            energy_reason=doubt,
            temperature_c=self._temperatures[first_index] if self.times[first_index] <= begin_ns else None,
        )

    def conditions_of_step(self, step: Step) -> DeviceConditions:
        """The conditions in a step; without figures in an outage, which may not have ended yet in a live view."""
        for outage in self.outages():
            if outage.begin_ns < step.t_ns and (step.begin_ns < outage.end_ns or not outage.back):
                return DeviceConditions(index=self.index, uuid=self.uuid)
        return self.conditions_between(step.begin_ns, step.t_ns)

    def _moment(self, t_ns: int) -> _Moment:
        """The moment, at most as far outside the samples as the nearest two are apart; not in an outage at the end."""
        times = self.times
        if len(times) < 2:
            return 0, 0.0
        after = min(max(1, bisect_left(times, t_ns)), len(times) - 1)
        part = (t_ns - times[after - 1]) / (times[after] - times[after - 1])
        return after, min(max(part, -1.0), 2.0 if self._silent_ns is None else 1.0)

    def _sum_at(self, name: str, moment: _Moment) -> tuple[float, float]:
        """The sum of a rate up to a moment, as in `_sums`: between two samples it grows evenly."""
        after, part = moment
        (known_before_ns, before), (known_after_ns, later) = self._sums[name][after - 1], self._sums[name][after]
        return known_before_ns + part * (known_after_ns - known_before_ns), before + part * (later - before)


class StepJoin:
    """Joins steps to the samples of some devices as both come in. Feed samples in the order of their time.

    `used_uuids` are the devices that the run trains on, by default all. `samples_factor` turns the samples of one
    rank's step into the whole run's: it is the data-parallel degree. `keep` bounds how many samples of a device stay in
    memory, `keep_steps` how many steps wait; None keeps all.
    """

    def __init__(
        self,
        uuids: Sequence[str],
        *,
        used_uuids: Collection[str] | None = None,
        samples_factor: float = 1.0,
        keep: int | None = None,
        keep_steps: int | None = None,
    ) -> None:
        self.tracks = {
            uuid: DeviceTrack(uuid, keep, is_used=used_uuids is None or uuid in used_uuids) for uuid in uuids
        }
        """The track of each device, by UUID."""
        self._samples_factor = samples_factor
        self._waiting: deque[Step] = deque(maxlen=keep_steps)
        self._seen_ns: int | None = None

    def add_tick(self, t_ns: int, devices: Iterable[DeviceReading]) -> None:
        """Add the devices of one tick."""
        self._seen_ns = t_ns
        for sample in devices:
            track = self.tracks.get(sample.uuid or "")
            if track is not None:
                track.add(t_ns if sample.t_ns is None else sample.t_ns, sample)

    def add(self, step: Step) -> None:
        """Take a step of rank 0; it is joined when a tick after its end has come."""
        if self.tracks:
            self._waiting.append(step)

    def joined(self, *, final: bool = False) -> list[StepConditions]:
        """The steps joined since the last call; `final`: no more samples will come."""
        conditions = []
        while self._waiting and (final or (self._seen_ns is not None and self._waiting[0].t_ns <= self._seen_ns)):
            conditions.append(self._join_step(self._waiting.popleft()))
        return conditions

    def conditions_between(self, begin_ns: int, end_ns: int) -> list[DeviceConditions]:
        """The conditions of each device with answers between two moments, as its track has them, in their order."""
        return [track.conditions_between(begin_ns, end_ns) for track in self.tracks.values() if track.times]

    def _join_step(self, step: Step) -> StepConditions:
        tracks = [track for track in self.tracks.values() if track.times and track.times[0] <= step.t_ns]
        devices = [track.conditions_of_step(step) for track in tracks]
        joules = total_joules(devices)
        samples = (step.samples or 0) * self._samples_factor
        return StepConditions(
            step=step.step,
            t_ns=step.t_ns,
            throttled_ms={
                cause.name: highest(device.throttled_ms.get(cause.name) for device in devices) for cause in CAUSES
            },
            clock_loss_fraction=highest(device.clock_loss_fraction for device in devices),
            energy_joules=joules,
            joules_per_sample=joules / samples if joules is not None and samples else None,
            temperature_c=highest(device.temperature_c for device in devices),
            devices=tuple(devices),
        )


def total_joules(devices: Sequence[DeviceConditions]) -> float | None:
    """The energy of all devices; None without any, or without one's: the sum of the others would pass for all."""
    joules = [device.energy_joules for device in devices]
    return sum(value for value in joules if value is not None) if joules and None not in joules else None


def join_of(
    devices: TimedReadings,
    uuids: Sequence[str],
    *,
    used_uuids: Collection[str] | None = None,
    samples_factor: float = 1.0,
) -> StepJoin:
    """A `StepJoin` with all samples of ended records."""
    join = StepJoin(uuids, used_uuids=used_uuids, samples_factor=samples_factor)
    timed_samples = ((t_ns, sample) for uuid in uuids for t_ns, sample in devices.get(uuid, ()))
    for t_ns, sample in sorted(timed_samples, key=itemgetter(0)):
        join.add_tick(t_ns, (sample,))
    return join

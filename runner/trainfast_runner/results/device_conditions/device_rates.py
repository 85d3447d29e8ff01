"""One device's rates of throttling, clock loss, clock and energy over time, built from its samples.

Energy and clocks follow straight lines between two samples. A duration counter gives the throttled time between two
samples; a reason that only one of them shows puts it next to that sample, with that sample's clock loss. Without a
counter a reason holds half way to a sample that does not show it.
"""

from __future__ import annotations

from trainfast_runner.machine.telemetry.throttle import CAUSES, Cause
from trainfast_runner.results.device_conditions.counter_growth import CounterGrowth
from trainfast_runner.results.device_conditions.rate import Rate
from trainfast_runner.results.device_conditions.readings import (
    Reading,
    clock_loss,
    mean_of_ends,
    reading_of,
    shows,
    working_clock_loss,
)


class DeviceRates:
    """The rates of one device. `sources` and `integrated` have an entry for each sample, about the time before it."""

    def __init__(self, growth: CounterGrowth) -> None:
        self._growth = growth
        self.throttled = {cause.name: Rate() for cause in CAUSES}
        self.lost = {cause.name: Rate() for cause in CAUSES}
        """Throttled share of the time, times the loss of SM clock meanwhile."""
        self.clock, self.clock_loss, self.energy = Rate(), Rate(), Rate()
        self.sources: dict[str, list[int]] = {cause.name: [0] for cause in CAUSES}
        """Index in `SOURCES` of the throttled time, by cause."""
        self.integrated = [False]
        """True if the energy is power times time."""
        self._rates = (*self.throttled.values(), *self.lost.values(), self.clock, self.clock_loss, self.energy)

    def begin(self, t_ns: int) -> None:
        """Begin with the first sample, at this time."""
        for rate in self._rates:
            rate.begin(t_ns)

    def grow(self, earlier: Reading, later: Reading, began_ns: int, t_ns: int) -> None:
        """Add the time between two samples."""
        ns = t_ns - began_ns
        self.clock.grow(t_ns, mean_of_ends(reading_of(earlier, "sm_clock_mhz"), reading_of(later, "sm_clock_mhz")))
        turns_ns = [self._grow_throttling(cause, earlier, later, began_ns, t_ns) for cause in CAUSES]
        turned_ns = next((turn_ns for turn_ns in turns_ns if turn_ns is not None), None)
        losses = working_clock_loss(earlier), working_clock_loss(later)
        # The clock jumps when throttling begins or ends, so a mean of both samples would be wrong on either side.
        if turned_ns is None or None in losses:
            self.clock_loss.grow(t_ns, mean_of_ends(*losses))
        else:
            self.clock_loss.grow(turned_ns, losses[0])
            self.clock_loss.grow(t_ns, losses[1])
        energy = self._growth.energy(earlier, later, ns)
        self.energy.grow(t_ns, None if energy.joules is None else energy.joules / ns)
        self.integrated.append(energy.is_integrated)

    def _grow_throttling(self, cause: Cause, earlier: Reading, later: Reading, began_ns: int, t_ns: int) -> int | None:
        """Add the throttling for one cause between two samples; return when it began or ended, if one shows that."""
        throttled = self.throttled[cause.name]
        lost = self.lost[cause.name]
        ns = t_ns - began_ns
        throttled_ns, source = self._growth.throttled(cause, earlier, later, ns)
        self.sources[cause.name].append(source)
        share = None if throttled_ns is None else throttled_ns / ns
        first, last = shows(cause.reasons, earlier), shows(cause.reasons, later)
        turn_ns: int | None = None
        if share is not None and first is not None and last is not None and first != last:
            # Throttling began or ended once between the samples: its time is one spell at the end that shows it.
            spell_ns = round(min(max(share, 0.0), 1.0) * ns)
            turn_ns = began_ns + spell_ns if first else t_ns - spell_ns
            if 0 < share < 1:
                loss = clock_loss(earlier if first else later)
                for until_ns, is_on in ((turn_ns, first), (t_ns, last)):
                    throttled.grow(until_ns, float(is_on))
                    lost.grow(until_ns, _product(float(is_on), loss))
                return turn_ns
        throttled.grow(t_ns, share)
        lost.grow(t_ns, _product(share, mean_of_ends(clock_loss(earlier), clock_loss(later))))
        return turn_ns

    def extend_ends(self, sample: Reading, *, is_first: bool) -> None:
        """Take the newest sample for the time after it, and the first one for the time before it."""
        self.clock_loss.extend_ends(working_clock_loss(sample), is_first=is_first)
        for cause in CAUSES:
            shown = shows(cause.reasons, sample)
            rate = None if shown is None else float(shown)
            self.throttled[cause.name].extend_ends(rate, is_first=is_first)
            self.lost[cause.name].extend_ends(_product(rate, clock_loss(sample)), is_first=is_first)

    def forget(self, count: int, before_ns: int) -> None:
        """Drop the `count` oldest samples, which are all before this time."""
        del self.integrated[:count]
        for sources in self.sources.values():
            del sources[:count]
        for rate in self._rates:
            rate.forget(before_ns)


def _product(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a * b

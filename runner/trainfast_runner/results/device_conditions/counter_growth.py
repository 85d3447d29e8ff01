"""Throttled time and energy of one device between two of its samples, by its counters where it has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from trainfast_runner.machine.telemetry.throttle import SOURCES, Cause
from trainfast_runner.results.device_conditions.readings import (
    ENERGY_FIELD,
    Reading,
    mean_of_ends,
    reading_of,
    shows,
)

_BY_REASON, _BY_POLICY, _BY_SAMPLES = range(len(SOURCES))


class ThrottledTime(NamedTuple):
    """Nanoseconds of throttling, None if unknown, and the index of their source in `SOURCES`."""

    ns: float | None
    source: int

    @property
    def is_counted(self) -> bool:
        """True if a counter gave the time: counters run on while nobody reads them."""
        return self.ns is not None and self.source != _BY_SAMPLES


class SpentEnergy(NamedTuple):
    """Energy in joules, None if unknown; `is_integrated` if it is power times time without a counter."""

    joules: float | None
    is_integrated: bool = False


class CounterGrowth:
    """The growth of one device's counters between two of its samples, without the `distrusted` ones."""

    def __init__(self, distrusted: frozenset[str]) -> None:
        self._distrusted = distrusted
        self._counts_energy = False
        """True if a counter was seen. Power times time never replaces a silent or distrusted counter."""

    def throttled(self, cause: Cause, earlier: Reading, later: Reading, ns: int) -> ThrottledTime:
        """The time throttled for `cause` in the `ns` nanoseconds between two samples."""
        policy_ns = self._growth(cause.policy_counter, earlier, later) if cause.policy_counter else None
        grown_ns = [
            growth for field in cause.reason_counters if (growth := self._growth(field, earlier, later)) is not None
        ]
        if grown_ns and len(grown_ns) == len(cause.reason_counters):
            return ThrottledTime(_union_ns(grown_ns, policy_ns, cause, (earlier, later), ns), _BY_REASON)
        if policy_ns is not None:
            return ThrottledTime(policy_ns, _BY_POLICY)
        if (sampled_ns := _sampled_ns(cause, earlier, later)) is not None:
            return ThrottledTime(sampled_ns, _BY_SAMPLES)
        shown = shows(cause.reasons, earlier), shows(cause.reasons, later)
        if None in shown:
            return ThrottledTime(None, _BY_REASON)
        return ThrottledTime(ns * sum(map(bool, shown)) / 2, _BY_SAMPLES)

    def energy(self, earlier: Reading, later: Reading, ns: int) -> SpentEnergy:
        """The energy spent in the `ns` nanoseconds between two samples."""
        first_mj, last_mj = earlier.energy_mj, later.energy_mj
        self._counts_energy |= first_mj is not None or last_mj is not None
        if ENERGY_FIELD in self._distrusted:
            return SpentEnergy(None)
        # A counter that went back was reset in between, and its difference is not an energy.
        if first_mj is not None and last_mj is not None and last_mj >= first_mj:
            return SpentEnergy((last_mj - first_mj) / 1e3)
        watts = (
            None if self._counts_energy else mean_of_ends(reading_of(earlier, "power_w"), reading_of(later, "power_w"))
        )
        return SpentEnergy(None) if watts is None else SpentEnergy(watts * ns / 1e9, is_integrated=True)

    def _growth(self, field: str, earlier: Reading, later: Reading) -> float | None:
        first, last = reading_of(earlier, field), reading_of(later, field)
        if first is None or last is None or last < first or field in self._distrusted:
            return None
        return last - first


def _union_ns(
    grown_ns: Sequence[float], policy_ns: float | None, cause: Cause, ends: tuple[Reading, Reading], ns: int
) -> float:
    """Nanoseconds in which any of a cause's reasons held. Reasons may hold at once, and then each counter runs.

    So the time is between the longest counter and the sum: the policy's counter within these bounds, else the longest
    if a sample shows two reasons at once, else the sum.
    """
    low_ns = max(grown_ns)
    high_ns = max(low_ns, min(sum(grown_ns), float(ns)))
    if policy_ns is not None:
        return min(max(policy_ns, low_ns), high_ns)
    shows_two_reasons = any(len(cause.reasons & set(sample.throttle_reasons or ())) > 1 for sample in ends)
    return low_ns if shows_two_reasons else high_ns


def _sampled_ns(cause: Cause, earlier: Reading, later: Reading) -> float | None:
    """Nanoseconds summed from polls between two samples; None without any."""
    first, last = (sample.throttled_sampled_ns.get(cause.name) for sample in (earlier, later))
    return None if first is None or last is None or last < first else float(last - first)

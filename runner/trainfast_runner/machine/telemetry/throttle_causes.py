"""The causes of throttling, the sources of throttled time, and the sum of sampled reasons."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

REASON_COUNTER, POLICY_COUNTER, SAMPLED_REASONS = "reason counter", "policy counter", "sampled reasons"
SOURCES = (REASON_COUNTER, POLICY_COUNTER, SAMPLED_REASONS)
"""Sources of throttled time, the most exact first: the driver's counter of the reason, its counter of the policy
(fields 74 to 76 of nvml.h), or sampled reasons, each holding half way to its neighbours, and read ten times a second on
a GPU without a counter."""


@dataclass(frozen=True)
class Cause:
    """A cause of throttling, with its counters (nanoseconds) and reasons."""

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
REASONS_OF_COUNTER = {
    "power_violation_ns": frozenset(("sw_power_cap",)),
    "thermal_violation_ns": frozenset(("sw_thermal", "hw_thermal")),
    "sync_boost_violation_ns": frozenset(("sync_boost",)),
    "sw_thermal_slowdown_ns": frozenset(("sw_thermal",)),
    "hw_thermal_slowdown_ns": frozenset(("hw_thermal",)),
    "hw_power_brake_ns": frozenset(("hw_power_brake",)),
}
"""The throttle reasons in whose presence each duration counter must run."""
LONGEST_NS = 5_000_000_000
"""Two readings further apart are no measure of the time between them."""


class SampledReasons:
    """Sums, by cause, the time in which its reasons were shown; half of the time between a reading that shows them and
    one that does not. The sum grows as a counter of the driver would."""

    def __init__(self) -> None:
        self._held_ns = {cause.name: 0 for cause in CAUSES}
        self._last: tuple[int, frozenset[str]] | None = None

    def see(self, reasons: Iterable[str], t_ns: int) -> None:
        """Take the reasons at CLOCK_MONOTONIC `t_ns`."""
        now = frozenset(reasons)
        before, self._last = self._last, (t_ns, now)
        if before is None or not 0 < t_ns - before[0] <= LONGEST_NS:
            return
        for cause in CAUSES:
            ends = bool(cause.reasons & before[1]) + bool(cause.reasons & now)
            self._held_ns[cause.name] += (t_ns - before[0]) * ends // 2

    def held_ns(self) -> dict[str, int]:
        """Nanoseconds by cause, since the first reading."""
        return dict(self._held_ns)

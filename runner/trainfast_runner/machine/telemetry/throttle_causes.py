"""The causes of throttling, and the sources of throttled time."""

from __future__ import annotations

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

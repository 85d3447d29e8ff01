"""Throttle reasons: the bits of nvmlDeviceGetCurrentClocksEventReasons; their causes and counters; their sum.

The bit values are those of nvml.h (`nvmlClocksEventReason*`, before R535 `nvmlClocksThrottleReason*`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

import msgspec

from trainfast_runner.errors import lowest

if TYPE_CHECKING:
    from trainfast_runner.records.tick import DeviceReading

Severity = Literal["none", "info", "warning"]


class Reason(msgspec.Struct, frozen=True):
    """One throttle reason: its bit, its name in records, its words on the screen and its severity."""

    bit: int
    name: str
    text: str
    severity: Severity


REASONS: tuple[Reason, ...] = (
    Reason(0x1, "idle", "idle", "none"),
    Reason(0x2, "application_clocks", "held at the application clocks someone set", "info"),
    Reason(0x4, "sw_power_cap", "at the power limit", "info"),
    Reason(0x8, "hw_slowdown", "hardware slowdown", "warning"),
    Reason(0x10, "sync_boost", "held to the clocks of its sync-boost group", "info"),
    Reason(0x20, "sw_thermal", "thermal slowdown (software)", "warning"),
    Reason(0x40, "hw_thermal", "thermal slowdown (hardware)", "warning"),
    Reason(0x80, "hw_power_brake", "power brake from the power supply", "warning"),
    Reason(0x100, "display_clock", "held at the display clock", "info"),
)
"""Every named bit. sw_power_cap is normal at full load; sw_thermal may also come from hot memory."""

_BY_NAME = {reason.name: reason for reason in REASONS}
_HW_SLOWDOWN = _BY_NAME["hw_slowdown"].bit


def decode(bits: int) -> list[str]:
    """Names of the bits that are set, lowest first; a bit without a name becomes hex such as "0x200"."""
    names = [reason.name for reason in REASONS if bits & reason.bit]
    unknown = bits & ~sum(reason.bit for reason in REASONS)
    return [*names, *(hex(1 << place) for place in range(unknown.bit_length()) if unknown >> place & 1)]


def believed(bits: int, previous_bits: int) -> int:
    """`bits` without a hw_slowdown that the sample before did not show.

    The bit flashes on a change of performance state, so one sample of it alone proves nothing.
    """
    return bits & ~(_HW_SLOWDOWN & ~previous_bits)


def cause_text(name: str) -> str:
    """A reason in words for the screen; an unknown reason is named by its bit."""
    reason = _BY_NAME.get(name)
    return reason.text if reason else f"reason {name}, unknown to this version"


def severity(name: str) -> Severity:
    """The severity of a reason: "none" (idle) is no throttling, "info" is expected under load, "warning" costs speed.

    An unknown reason is a warning: better shown once too often than dropped.
    """
    reason = _BY_NAME.get(name)
    return reason.severity if reason else "warning"


class Cause(msgspec.Struct, frozen=True):
    """A cause of throttling, with its counters (nanoseconds) and reasons."""

    name: str
    text: str
    reason_counters: tuple[str, ...]
    policy_counter: str | None
    reasons: frozenset[str]


_THERMAL = frozenset(("sw_thermal", "hw_thermal"))
CAUSES = (
    Cause("thermal", "heat", ("sw_thermal_slowdown_ns", "hw_thermal_slowdown_ns"), "thermal_violation_ns", _THERMAL),
    Cause("power", "the power limit", (), "power_violation_ns", frozenset(("sw_power_cap",))),
    Cause("brake", "the power brake", ("hw_power_brake_ns",), None, frozenset(("hw_power_brake",))),
    Cause("sync_boost", "its sync-boost group", (), "sync_boost_violation_ns", frozenset(("sync_boost",))),
)
"""Every cause that is joined to steps, under the names that records use."""
UMBRELLA_CAUSE = "hardware"
"""The cause that NVML sets together with a more specific one; it is not joined to steps."""
CAUSE_BY_REASON = {
    "hw_slowdown": UMBRELLA_CAUSE,
    **{reason: cause.name for cause in CAUSES for reason in cause.reasons},
}
"""The cause of each throttle reason; clocks that somebody set are not a cause, because the GPU obeys them."""
REASONS_OF_COUNTER = {cause.policy_counter: cause.reasons for cause in CAUSES if cause.policy_counter is not None} | {
    counter: frozenset((counter.removesuffix("_ns").removesuffix("_slowdown"),))
    for cause in CAUSES
    for counter in cause.reason_counters
}
"""Every duration counter, with the throttle reasons in whose presence it must run."""


def causes_of(reasons: Iterable[str] | None) -> frozenset[str]:
    """Return the causes behind a device's throttle reasons, `UMBRELLA_CAUSE` only if nothing more specific is set."""
    causes = frozenset(CAUSE_BY_REASON[reason] for reason in reasons or () if reason in CAUSE_BY_REASON)
    return causes - {UMBRELLA_CAUSE} if causes & {"thermal", "brake"} else causes


def slows_down_at_c(reading: DeviceReading) -> float | None:
    """The lower of the two temperatures at which the GPU is slowed down, in degrees Celsius; None without either."""
    return lowest((reading.gpu_max_temperature_c, reading.slowdown_temperature_c))

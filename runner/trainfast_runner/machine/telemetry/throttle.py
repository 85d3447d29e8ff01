"""Throttle reasons: the bits of nvmlDeviceGetCurrentClocksEventReasons with name, words and severity.

The bit values are those of nvml.h (`nvmlClocksEventReason*`, before R535 `nvmlClocksThrottleReason*`).
"""

import functools
from dataclasses import dataclass
from typing import Literal

Severity = Literal["none", "info", "warning"]


@dataclass(frozen=True)
class Reason:
    """One throttle reason: its bit, its name in records, its words on the screen and its severity."""

    bit: int
    name: str
    words: str
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
    return list(_decoded(bits))


@functools.lru_cache(maxsize=64)
def _decoded(bits: int) -> tuple[str, ...]:
    names = [reason.name for reason in REASONS if bits & reason.bit]
    unknown = bits & ~sum(reason.bit for reason in REASONS)
    while unknown:
        lowest = unknown & -unknown
        names.append(hex(lowest))
        unknown ^= lowest
    return tuple(names)


def believed(bits: int, previous_bits: int) -> int:
    """`bits` without a hw_slowdown that the sample before did not show.

    The bit flashes on a change of performance state, so one sample of it alone proves nothing.
    """
    return bits & ~(_HW_SLOWDOWN & ~previous_bits)


def words(name: str) -> str:
    """A reason in words for the screen; an unknown reason is named by its bit."""
    reason = _BY_NAME.get(name)
    return reason.words if reason else f"reason {name}, unknown to this version"


def severity(name: str) -> Severity:
    """ "none" is not throttling at all (idle), "info" is expected under load, "warning" costs speed.

    An unknown reason is a warning: better shown once too often than dropped.
    """
    reason = _BY_NAME.get(name)
    return reason.severity if reason else "warning"

"""The values that a reading can have: a driver answers with success and an impossible value too."""

from __future__ import annotations

import functools
import re
from typing import Any, Final

import msgspec

from trainfast_runner.machine.telemetry import throttle
from trainfast_runner.records.tick import DeviceProcess

IMPOSSIBLE: Final = "the driver's answer is impossible"
_TEN_YEARS_S: Final = 10 * 365 * 86400
RANGES: Final[dict[str, tuple[float, float]]] = {
    "percent": (0, 100),
    "c": (0, 150),
    "w": (0, 5_000),
    "mj": (0, 5_000_000 * _TEN_YEARS_S),
    "mhz": (0, 5_000),
    "ns": (0, _TEN_YEARS_S * 1_000_000_000),
    "bytes": (0, (1 << 64) - 1),
    "errors": (0, 1_000_000_000),
    "count": (0, 1_024),
    "fan_percent": (0, 120),
    "degrees_to_slowdown_c": (-50, 150),
    "power_limit_w": (1, 5_000),
    "sm_clock_max_mhz": (1, 5_000),
    "memory_total_bytes": (1, 1 << 50),
    **dict.fromkeys(("memory_clock_mhz", "memory_clock_max_mhz"), (0, 30_000)),
    **dict.fromkeys(("memory_used_bytes", "memory_free_bytes"), (0, 1 << 50)),
    **dict.fromkeys(("slowdown_temperature_c", "shutdown_temperature_c"), (1, 150)),
    **dict.fromkeys(("gpu_max_temperature_c", "memory_max_temperature_c"), (1, 150)),
    **dict.fromkeys(("remapped_rows_corrected", "remapped_rows_uncorrected"), (0, 100_000)),
    **dict.fromkeys(("remapped_rows_pending", "remapped_rows_failed"), (0, 1)),
    **dict.fromkeys(("pcie_generation", "pcie_generation_max"), (1, 10)),
    **dict.fromkeys(("pcie_width", "pcie_width_max"), (1, 32)),
}
"""The lowest and the highest value of a reading by its name, else by its unit, the last word of the name.

Chosen, not measured, well beyond any product, since only garbage must fall out: boards of 2026 take up to 1,400 W and
have up to 288 GB and 32 lanes, NVML's manual has fans above 100 %, and 512 rows of a memory can be remapped. Counters
may grow for ten years.
"""
MOST_UNKNOWN_REASONS: Final = 4
"""Chosen, not measured: throttle bits without a name at once. Drivers have added one at a time."""
MAX_PID: Final = 1 << 22
"""PID_MAX_LIMIT of Linux with 64 bits (include/linux/threads.h)."""
_KNOWN_REASONS: Final = sum(reason.bit for reason in throttle.REASONS)


@functools.cache
def _limits(name: str) -> tuple[float, float] | None:
    return RANGES.get(name) or RANGES.get(name.rpartition("_")[2])


def refusal(name: str, value: Any) -> str | None:
    """The reason that a value of this reading is impossible; None for any other, and for a reading without a range."""
    if value is None:
        return None
    if (limits := _limits(name)) is not None:
        low, high = limits
        return None if low <= value <= high else f"{IMPOSSIBLE}: {value:,} is not between {low:,} and {high:,}"
    if name == "throttle_reasons" and (value & ~_KNOWN_REASONS).bit_count() > MOST_UNKNOWN_REASONS:
        return f"{IMPOSSIBLE}: {value:#x}"
    if name == "compute_capability" and not re.fullmatch(r"[1-9]\d?\.\d", value):
        return f"{IMPOSSIBLE}: {value}"
    return None


def drop_impossible(values: dict[str, Any]) -> dict[str, str]:
    """Set the impossible values to None, by field of `DeviceReading`; return the reasons by field."""
    reasons = {name: reason for name, value in values.items() if (reason := refusal(name, value)) is not None}
    if "temperature_c" in reasons and values.get("degrees_to_slowdown_c") is not None:
        reasons["degrees_to_slowdown_c"] = reasons["temperature_c"]
    values.update(dict.fromkeys(reasons))
    total_bytes = values.get("memory_total_bytes")
    for name in ("memory_used_bytes", "memory_free_bytes"):
        if total_bytes is not None and (values.get(name) or 0) > total_bytes:
            reasons[name] = f"{IMPOSSIBLE}: {values[name]:,} of {total_bytes:,} bytes"
            values[name] = None
    listed: list[DeviceProcess] = values.get("processes") or []
    most_bytes = RANGES["memory_total_bytes"][1] if total_bytes is None else total_bytes
    wrong_pids = [entry.pid for entry in listed if not 0 < entry.pid <= MAX_PID]
    wrong_bytes = [entry.pid for entry in listed if (entry.memory_used_bytes or 0) > most_bytes]
    if wrong_pids or wrong_bytes:
        values["processes"] = [
            msgspec.structs.replace(entry, memory_used_bytes=None) if entry.pid in wrong_bytes else entry
            for entry in listed
            if entry.pid not in wrong_pids
        ]
        for name, pids in (("pid", wrong_pids), ("memory_used_bytes", wrong_bytes)):
            if pids:
                reasons[f"processes.{name}"] = f"{IMPOSSIBLE} for process {', '.join(map(str, pids[:3]))}"
    return reasons


MAX_APART = 2.0
"""Chosen, not measured: from this factor between the counter's energy and power times time on, neither is believed."""
MIN_JOULES = 10.0
"""Least energy by which a counter is judged: half a second of a GPU at rest."""
STILL_S = 0.5
"""Seconds after which a counter that stands still is judged: the driver updates it several times as often."""
MIN_GROWING_S = 10.0
"""Least seconds over which a growing counter is judged: power is an average over a second at best, or a sample."""


def energy_doubt(counted_j: float, integrated_j: float, seconds: float) -> str | None:
    """The reason to distrust an energy counter that grew by `counted_j` while power times time was `integrated_j`.

    None if both agree, or if too little was measured. Where they are far apart, neither is a measurement.
    """
    smaller_j, larger_j = sorted((counted_j, integrated_j))
    enough_s = STILL_S if counted_j == 0 else MIN_GROWING_S
    if seconds < enough_s or larger_j < MIN_JOULES or larger_j <= MAX_APART * smaller_j:
        return None
    return (
        f"the energy counter shows {counted_j:,.0f} J in {seconds:.1f} s,"
        f" but {integrated_j / seconds:,.0f} W over that time are {integrated_j:,.0f} J"
    )

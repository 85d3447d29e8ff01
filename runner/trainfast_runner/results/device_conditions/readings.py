"""Readings of one device in one sample, from a run's records or live ticks; None if the device lacks the reading."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from trainfast_runner.machine.telemetry.throttle import REASONS_OF_COUNTER
from trainfast_runner.records.run_records import DeviceSample
from trainfast_runner.records.tick import DeviceReading

Reading = DeviceSample | DeviceReading
"""A device's sample, read from whole records or from live ticks."""
TimedReadings = Sequence[tuple[int, Reading]]
"""A device's readings, oldest first, each with its CLOCK_MONOTONIC ns."""

ENERGY_FIELD = "energy_mj"
CHANGING = ("temperature_c", "throttle_reasons", ENERGY_FIELD, "power_w", "sm_clock_mhz", "memory_used_bytes")
"""Readings that change from tick to tick: a GPU that answers gives at least one."""


def reading_of(sample: Reading, field: str) -> float | None:
    """A reading by its name; None when the records or the device lack it."""
    value: float | None = getattr(sample, field, None)
    return value


def is_answer(sample: Reading) -> bool:
    """True if the sample holds any changing reading."""
    return any(getattr(sample, name, None) is not None for name in (*CHANGING, *REASONS_OF_COUNTER))


def shows(reasons: AbstractSet[str], sample: Reading) -> bool | None:
    """True if a sample shows one of these throttle reasons; None without a reading of the reasons."""
    return None if sample.throttle_reasons is None else not reasons.isdisjoint(sample.throttle_reasons)


def clock_loss(sample: Reading) -> float | None:
    """1 - SM clock / its maximum."""
    clock = reading_of(sample, "sm_clock_mhz")
    max_clock = reading_of(sample, "sm_clock_max_mhz")
    return max(0.0, 1 - clock / max_clock) if clock is not None and max_clock else None


def working_clock_loss(sample: Reading) -> float | None:
    """The clock loss of a GPU with work; None of an idle GPU, which lowers its clock to save power."""
    return None if "idle" in (sample.throttle_reasons or ()) else clock_loss(sample)


def mean_of_ends(first: float | None, last: float | None) -> float | None:
    """The mean of a reading over the time between two samples; None if one of them lacks it."""
    return None if first is None or last is None else (first + last) / 2

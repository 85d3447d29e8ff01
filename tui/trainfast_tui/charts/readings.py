"""The device readings that can be charted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from trainfast_runner.machine.telemetry.throttle import slows_down_at_c
from trainfast_tui.live.snapshot import Snapshot, used_uuids
from trainfast_tui.text import format as fmt

if TYPE_CHECKING:
    from trainfast_runner.records.tick import DeviceReading, Tick
    from trainfast_runner.running.follower import RunSnapshot


class Reading(msgspec.Struct, frozen=True):
    """One device reading that can be charted."""

    name: str
    value_of: Callable[[DeviceReading], float | None]
    format_value: fmt.Formatter
    limit_of: Callable[[DeviceReading], float | None] | None = None
    """Returns a device's limit; None if the reading has none."""
    limit_label: str = ""
    y_max: float | None = None
    """The upper end of the y axis; None follows the data."""
    binary: bool = False
    """Round the ends of the y axis to powers of two, for bytes."""
    limit_headroom: float | None = None
    """Headroom of the y axis above the limit, in the reading's unit; its lower end then follows the data.

    None for an axis from zero to the data or the limit.
    """


GPU_READINGS: tuple[Reading, ...] = (
    Reading("GPU utilization", lambda gpu: gpu.gpu_utilization_percent, fmt.percent, y_max=100.0),
    Reading(
        "GPU memory",
        lambda gpu: gpu.memory_used_bytes,
        fmt.size,
        lambda gpu: gpu.memory_total_bytes,
        "total",
        binary=True,
    ),
    Reading(
        "temperature", lambda gpu: gpu.temperature_c, fmt.celsius, slows_down_at_c, "slowdown", limit_headroom=13.0
    ),
    Reading("power", lambda gpu: gpu.power_w, fmt.watts, lambda gpu: gpu.power_limit_w, "cap"),
    Reading("SM clock", lambda gpu: gpu.sm_clock_mhz, fmt.megahertz, lambda gpu: gpu.sm_clock_max_mhz, "max"),
)
CPU_READING_NAMES = ("CPU of all cores", "memory")


def has_gpu_samples(snapshot: Snapshot) -> bool:
    """True if a GPU has a sample; else the CPU is charted."""
    ticks = charted_ticks(snapshot)
    return bool(ticks) and bool(ticks[-1].devices)


def reading_names(snapshot: Snapshot) -> tuple[str, ...]:
    """Return the names of the readings that can be charted, the most important first."""
    return tuple(reading.name for reading in GPU_READINGS) if has_gpu_samples(snapshot) else CPU_READING_NAMES


def charted_ticks(snapshot: Snapshot) -> Sequence[Tick]:
    """Return the machine's samples, or an ended run's own."""
    run = snapshot.run
    return snapshot.machine_ticks if run is None or run.is_live else run.ticks


def charted_uuids(run: RunSnapshot | None, tick: Tick) -> list[str]:
    """Return the UUIDs of the GPUs in this tick that the run uses or watches, or of all if it uses none of them."""
    run_uuids = used_uuids(run)
    uuids = [device.uuid for device in tick.devices if device.uuid]
    return [uuid for uuid in uuids if uuid in run_uuids] or uuids

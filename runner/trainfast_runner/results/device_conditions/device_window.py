"""Energy, throttled time and outages of the devices during the measured steps."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from trainfast_runner.known_values import highest
from trainfast_runner.machine.telemetry.energy import energy_distrust
from trainfast_runner.machine.telemetry.throttle import CAUSES
from trainfast_runner.records.result_conditions import Energy, RecordedOutage, Throttle, ThrottledDevice
from trainfast_runner.records.run_lines import Step
from trainfast_runner.results.device_conditions.device_track import (
    ENERGY_COUNTER,
    INTEGRATED_POWER,
    DeviceConditions,
    DeviceTrack,
)
from trainfast_runner.results.device_conditions.outages import Outage
from trainfast_runner.results.device_conditions.readings import TimedReadings

MIN_SAMPLES = 2
"""Samples needed within the measured steps for their energy. Steps that end before the second sample, as a fast GPU's
first ones, would get the energy of the start and the end instead."""


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


def window_energy(
    devices: Sequence[DeviceConditions],
    readings: Sequence[TimedReadings],
    window: Window | None,
    trained_samples: float,
    steps: int,
) -> Energy:
    """Energy summed over devices, each with its `readings`; no figure if one device's energy is unknown or doubtful."""
    if window is None or not is_sampled(readings, window):
        return Energy()
    for device, device_readings in zip(devices, readings, strict=True):
        readings_in_window = [reading for reading in device_readings if window.begin_ns <= reading[0] <= window.end_ns]
        # Both: the measured steps alone may be too short to refute a counter that the whole run refutes.
        if (doubt := energy_distrust(readings_in_window) or energy_distrust(device_readings)) is not None:
            return Energy(reason=f"GPU {device.index}: {doubt}")
    joules = [device.energy_joules for device in devices]
    total_joules = sum(value for value in joules if value is not None)
    if not joules or None in joules:
        return Energy()
    is_integrated = any(device.energy_source == INTEGRATED_POWER for device in devices)
    return Energy(
        joules=total_joules,
        joules_per_sample=total_joules / trained_samples if trained_samples else None,
        joules_per_step=total_joules / steps if steps else None,
        source=INTEGRATED_POWER if is_integrated else ENERGY_COUNTER,
    )


def is_sampled(devices: Iterable[TimedReadings], window: Window | None) -> bool:
    """True if every device was sampled often enough in the window for its energy."""
    return window is not None and all(
        sum(window.begin_ns <= t_ns <= window.end_ns for t_ns, _ in readings) >= MIN_SAMPLES for readings in devices
    )


def window_throttle(
    devices: Sequence[DeviceConditions], window: Window | None, step_ms: float | None, used_uuids: Collection[str]
) -> Throttle:
    """Throttled shares of the window, for each device and the worst; None without samples.

    Steps, of a median of `step_ms`, lose time to those devices alone whose UUIDs are among `used_uuids`, not to one
    that is only watched.
    """
    if window is None:
        return Throttle()
    rows = [_throttled_device(device, window, step_ms if device.uuid in used_uuids else None) for device in devices]
    return Throttle(
        **{
            f"{cause.name}_fraction": highest(getattr(row, f"{cause.name}_fraction") for row in rows)
            for cause in CAUSES
        },
        clock_loss_fraction=highest(device.clock_loss_fraction for device in devices),
        devices=rows,
    )


def _throttled_device(device: DeviceConditions, window: Window, step_ms: float | None) -> ThrottledDevice:
    """Return one device's row; `step_ms` is the median of the steps that trained on it, None without any."""
    shares: dict[str, Any] = {}
    for cause in CAUSES:
        throttled_ms = device.throttled_ms.get(cause.name)
        shares[f"{cause.name}_fraction"] = None if throttled_ms is None else throttled_ms / window.ms
        shares[f"{cause.name}_source"] = device.sources.get(cause.name)
    return ThrottledDevice(
        index=device.index,
        uuid=device.uuid,
        **shares,
        throttled_ms=device.throttled_ms,
        lost_ms_per_step={
            # Pauses between steps lose time, too, that no step lost.
            name: None if lost is None or step_ms is None else min(1.0, lost / window.ms) * step_ms
            for name, lost in device.lost_ms.items()
        },
        clock_loss_fraction=device.clock_loss_fraction,
        temperature_c=device.temperature_c,
    )


def outage_rows(tracks: Iterable[DeviceTrack], window: Window | None) -> list[RecordedOutage]:
    """Return each time in which a watched GPU that had answered gave no reading."""
    return [_outage_row(track.index, outage, window) for track in tracks for outage in track.outages()]


def _outage_row(index: int | None, outage: Outage, window: Window | None) -> RecordedOutage:
    began_ns, ended_ns = outage.silent_ns, outage.end_ns
    covered_ns = 0 if window is None else min(ended_ns, window.end_ns) - max(began_ns, window.begin_ns)
    return RecordedOutage(
        device=index,
        seconds=(ended_ns - began_ns) / 1e9,
        back=outage.back,
        measured_fraction=0.0 if window is None else max(0, covered_ns) / (window.end_ns - window.begin_ns),
        throttled_ms={cause.name: ns / 1e6 for cause in CAUSES if (ns := outage.grown.get(cause.name, 0.0)) > 0},
    )


def hottest_c(devices: Sequence[DeviceConditions]) -> float | None:
    """The highest temperature at the start of the window, in degrees Celsius."""
    return highest(device.temperature_c for device in devices)

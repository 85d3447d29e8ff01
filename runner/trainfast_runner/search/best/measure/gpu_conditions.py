"""Throttling and energy of the GPUs of a trial, from the samples of its process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trainfast_runner.records.run_records import read_records
from trainfast_runner.results.device_conditions import DeviceConditions, join_of


def gpu_conditions(directory: Path, uuids: Sequence[str], begin_ns: int, end_ns: int) -> list[DeviceConditions]:
    """Return throttling and energy of a run's GPUs between two moments (CLOCK_MONOTONIC); empty on a CPU."""
    if not uuids:
        return []
    devices = read_records(directory).device_samples
    return join_of(devices, list(uuids)).conditions_between(begin_ns, end_ns)


def joules_of(devices: Sequence[DeviceConditions]) -> float | None:
    """Return the energy summed over the GPUs; None without a GPU, or if a GPU has no figure."""
    joules = [device.energy_joules for device in devices]
    known_joules = [value for value in joules if value is not None]
    return sum(known_joules) if joules and len(known_joules) == len(joules) else None

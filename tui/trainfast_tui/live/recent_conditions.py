"""The device conditions of a run's counted steps: which steps count, silent GPUs, and the GPU throttled most."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainfast_runner.results.device_conditions import DeviceConditions, StepConditions
    from trainfast_runner.running.follower import RunSnapshot

RECENT_STEPS = 20
"""A live run's figures are of this many newest steps. Conditions are means: a median would hide brief throttling."""


def counted_steps(run: RunSnapshot) -> Sequence[StepConditions]:
    """Return the steps after the timing warm-up, or all if there are none; only the newest of a live run."""
    warmup = {step.step for step in run.steps if step.warmup}
    steps = [step for step in run.conditions if step.step not in warmup] or list(run.conditions)
    return steps[-RECENT_STEPS:] if run.is_live else steps


def silent_gpus(steps: Sequence[StepConditions]) -> list[int | None]:
    """Return the GPUs that reported in earlier steps but not in the newest; their earlier readings are out of date."""
    spoke = {device.uuid for step in steps for device in step.devices if not _has_no_reading(device)}
    return [device.index for device in steps[-1].devices if device.uuid in spoke and _has_no_reading(device)]


def _has_no_reading(device: DeviceConditions) -> bool:
    readings = (device.sm_clock_mhz, device.energy_joules, *device.throttled_ms.values())
    return all(reading is None for reading in readings)


def worst_gpu(steps: Sequence[StepConditions], cause: str) -> int | None:
    """Return the index of the GPU that this cause throttled most over the steps; None for a single device."""
    totals: dict[int | None, float] = {}
    for step in steps:
        for device in step.devices:
            totals[device.index] = totals.get(device.index, 0.0) + (device.throttled_ms.get(cause) or 0.0)
    return None if len(totals) < 2 else max(totals, key=lambda index: totals[index])

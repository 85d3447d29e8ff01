"""`--cool-to`: start only when the GPUs of a run are below a temperature, so that runs begin alike."""

from __future__ import annotations

import time

from trainfast_runner.launch import RunPlan
from trainfast_runner.problem import Problem
from trainfast_runner.telemetry.nvml import Nvml
from trainfast_tui.cli.progress import Progress
from trainfast_tui.format import celsius, duration

LOOK_EVERY_S = 1.0


def wait_until_cool(plan: RunPlan, below_c: float) -> None:
    """Return when every watched GPU is below `below_c`. Raises Problem where there is no temperature to wait for."""
    uuids = {gpu.uuid for gpu in plan.watched}
    nvml, progress, began = Nvml(), Progress(), time.monotonic()
    try:
        while True:
            readings, missing = nvml.sample(time.monotonic_ns())
            found = [gpu.temperature_c for gpu in readings if gpu.uuid in uuids and gpu.temperature_c is not None]
            if not found:
                why = missing.get("nvml") or "the run watches no GPU that gives its temperature"
                raise Problem(f"--cool-to {below_c:g}: there is no temperature to wait for: {why}", key="--cool-to")
            if max(found) < below_c:
                return
            waited = duration(time.monotonic() - began)
            progress.waiting(f"cooling: {celsius(max(found))}, waiting for {celsius(below_c)}, {waited} so far")
            time.sleep(LOOK_EVERY_S)
    finally:
        progress.close()
        nvml.close()

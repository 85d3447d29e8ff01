"""Collect the known speeds of a device for predictions: its calibration, and earlier runs with their traces."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from trainfast_runner.errors import UserError
from trainfast_runner.machine import calibration
from trainfast_runner.machine.calibration import Ceiling
from trainfast_runner.machine.cpu.cpu_info import cpu_name
from trainfast_runner.machine.devices import Machine
from trainfast_runner.memory.model import MemoryModel
from trainfast_runner.memory.sharding import PREDICTED_STRATEGIES
from trainfast_runner.memory.tracing import cached_model, cached_models
from trainfast_runner.records.home import Home
from trainfast_runner.records.run_file import PredictedSpeed
from trainfast_runner.running.planning import RunPlan
from trainfast_runner.search.speed.earlier_speeds import SpeedDevice, measured_speeds
from trainfast_runner.search.speed.predicted_speed import SpeedModel, UnknownSpeed
from trainfast_runner.search.speed.step_time import step_time
from trainfast_runner.settings.device_counts import device_count, first_gpu_name
from trainfast_runner.settings.spec import RunSpec

NOMINAL_CEILINGS = {
    "cpu": Ceiling(
        device="cpu", name="", tflops=dict.fromkeys(("fp32", "bf16"), 0.1), copy_gb_per_s=10.0, operation_us=10.0
    ),
    "cuda": Ceiling(
        device="cuda",
        name="",
        tflops={"fp32": 20.0, "tf32": 60.0, "bf16": 120.0, "fp16": 120.0},
        copy_gb_per_s=1000.0,
        operation_us=10.0,
    ),
}
"""Round speeds for a device that was not calibrated; measured runs correct them."""


@dataclass(frozen=True)
class DeviceSpeedModel:
    """Calibration and fitted model behind the speed predictions of one training on one device."""

    ceiling: Ceiling
    cores: int
    model: SpeedModel

    def predict(self, spec: RunSpec, devices: int, memory_model: MemoryModel) -> PredictedSpeed | UnknownSpeed:
        """Predict the speed of these settings on `devices` devices; takes a few milliseconds."""
        if spec.knobs["strategy"] not in PREDICTED_STRATEGIES:
            return UnknownSpeed(f"strategy={spec.knobs['strategy']} is not predicted")
        if self.ceiling.device == "cpu" and spec.knobs["memory_limit"] is not None:
            return UnknownSpeed("memory_limit on a CPU slows every step")
        step = step_time(spec, memory_model, devices, self.cores, self.ceiling)
        if step is None:
            return UnknownSpeed(f"precision={spec.knobs['precision']} is not calibrated on this device")
        return self.model.predict(spec, devices, step)


def speed_model_on(home: Home, spec: RunSpec, device: SpeedDevice, python: str | None = None) -> DeviceSpeedModel:
    """Return the model of the speeds known on a device, for the spec's training with other knobs.

    Reads the newest runs and their cached traces: some ten milliseconds. Raises UserError when the home is unreadable.
    """
    name = device.gpu or cpu_name()
    calibrated = calibration.is_calibrated(home, name)
    ceiling = calibration.read(home)[name] if calibrated else NOMINAL_CEILINGS[device.kind]
    cores = len(os.sched_getaffinity(0))
    model_of = cached_models(device.kind, python, device.gpu or None)
    measured_steps = []
    for speed in measured_speeds(home, spec, device):
        try:
            memory_model = model_of(speed.spec)
        except UserError:
            continue  # the model was never traced, or is gone
        step = None if memory_model is None else step_time(speed.spec, memory_model, speed.devices, cores, ceiling)
        if step is not None:
            measured_steps.append((speed, step))
    return DeviceSpeedModel(ceiling, cores, SpeedModel(spec, measured_steps, calibrated=calibrated))


def predict_speed(
    home: Home, spec: RunSpec, machine: Machine, memory_model: MemoryModel, python: str | None = None
) -> PredictedSpeed | UnknownSpeed:
    """Predict the speed of a run on this machine. Raises UserError for devices that do not exist."""
    device = SpeedDevice(machine.used_by(spec.knobs["devices"]).device, first_gpu_name(spec, machine) or "")
    return speed_model_on(home, spec, device, python).predict(spec, device_count(spec, machine), memory_model)


def with_predicted_speed(plan: RunPlan, home: Home) -> RunPlan:
    """Return the plan with its predicted speed, if one can be shown, from an earlier trace of its model.

    Nothing is predicted for a script of the user's own. Raises UserError when the home is unreadable.
    """
    if plan.script is not None:
        return plan
    device = SpeedDevice(plan.device, next(iter(plan.device_names), ""))
    memory_model = cached_model(plan.spec, plan.device, plan.python)
    if memory_model is None:
        return plan
    devices = max(plan.world_size, len(plan.gpus))
    predicted_speed = speed_model_on(home, plan.spec, device, plan.python).predict(plan.spec, devices, memory_model)
    return replace(plan, predicted_speed=predicted_speed) if isinstance(predicted_speed, PredictedSpeed) else plan

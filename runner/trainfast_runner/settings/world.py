"""How many devices and processes a run has, and into how many slices they cut its global batch."""

from __future__ import annotations

from dataclasses import replace

from trainfast_runner.machine.cpu.device_names import CPU, asks_for_cpu, cpu_processes
from trainfast_runner.machine.devices import Machine
from trainfast_runner.settings.knob_type import Knobs
from trainfast_runner.settings.knob_values import MOST_CPU_PROCESSES, KnobValue
from trainfast_runner.settings.spec import RunSpec

ONE_PROCESS = ("single", "dp", "naive-mp")
"""Strategies whose devices, one or several, belong to one process."""
TENSOR_PARALLEL = ("tp", "ddp+tp", "fsdp+tp")
DATA_PARALLEL = ("dp", "ddp", "fsdp", "zero1", "zero2", "zero3", "zero2-offload", "zero3-offload")


def world_size(spec: RunSpec, machine: Machine) -> int:
    """Number of ranks (processes) a run starts. Raises UserError when there are not as many devices."""
    return 1 if spec.knobs["strategy"] in ONE_PROCESS else device_count(spec, machine)


def device_count(spec: RunSpec, machine: Machine) -> int:
    """Number of devices a run uses; on a CPU each rank is one. Raises UserError when there are not as many."""
    devices, strategy = devices_asked(spec.knobs), str(spec.knobs["strategy"])
    machine = machine.used_by(devices)
    if strategy == "single":
        return 1
    if machine.device == "cuda":
        return len(machine.choose(device_choice(devices), strategy))
    if isinstance(devices, int):
        return devices
    if (processes := cpu_processes(devices)) is not None:
        return processes
    if strategy == "ddp+pp":
        return 2 * int(str(spec.knobs["pp_degree"]))
    if strategy in TENSOR_PARALLEL:
        return 2 * int(str(spec.knobs["tp_degree"]))
    return min(MOST_CPU_PROCESSES, max(2, machine.cores))


def devices_asked(knobs: Knobs) -> KnobValue:
    """The `devices` knob, or what the strategy itself says about it: one pipeline has pp_degree devices."""
    devices = knobs["devices"]
    if devices in (None, CPU) and knobs["strategy"] in ("pp", "tp"):
        degree = knobs[f"{knobs['strategy']}_degree"]
        return degree if devices is None else f"{CPU}:{degree}"
    return devices


def recorded_devices(spec: RunSpec, machine: Machine) -> KnobValue:
    """The `devices` knob as a run records it: with the open number filled in. Raises UserError as `device_count`."""
    devices = spec.knobs["devices"]
    if devices is None:
        return device_count(spec, machine)
    return f"{CPU}:{device_count(spec, machine)}" if asks_for_cpu(devices) else devices


def with_devices(spec: RunSpec, machine: Machine) -> RunSpec:
    """The run with its number of devices where one process uses all of several. Raises UserError as `device_count`."""
    if spec.knobs["strategy"] not in ("dp", "naive-mp") or spec.knobs["devices"] is not None:
        return spec
    return replace(spec, knobs={**spec.knobs, "devices": device_count(spec, machine)})


def data_parallel_degree(knobs: Knobs, devices: int) -> int:
    """Into how many slices that many devices cut the global batch."""
    strategy = knobs.get("strategy")
    if strategy in DATA_PARALLEL:
        return devices
    if strategy in ("ddp+pp", "ddp+tp", "fsdp+tp"):
        return max(1, devices // int(str(knobs[f"{str(strategy)[-2:]}_degree"])))
    return 1


def global_batch(knobs: Knobs, devices: int) -> int:
    """Samples of one optimizer step: batch_size x grad_accum x data-parallel degree."""
    return int(str(knobs["batch_size"])) * int(str(knobs["grad_accum"])) * data_parallel_degree(knobs, devices)


def device_choice(value: object) -> int | str | None:
    """The value of `devices` as a machine takes it: a count, a list, or its own choice."""
    return value if isinstance(value, int | str) else None

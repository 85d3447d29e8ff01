"""Counts of a run: its devices, its processes and the ranks that share out its global batch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from trainfast_runner.machine.devices import Gpus, Machine
from trainfast_runner.records.run_file import RunFile
from trainfast_runner.settings.knob_values import MAX_CPU_PROCESSES, KnobValue, KnobValues, whole_number
from trainfast_runner.settings.spec import RunSpec, strategy_or_single
from trainfast_runner.units import CPU, asks_for_cpu, count_asked


def world_size(spec: RunSpec, machine: Machine) -> int:
    """Number of ranks (processes) a run starts. Raises UserError when there are not as many devices."""
    return 1 if strategy_or_single(spec.knobs).one_process else device_count(spec, machine)


def device_count(spec: RunSpec, machine: Machine) -> int:
    """Number of devices a run uses; on a CPU each rank is one. Raises UserError when there are not as many."""
    devices = devices_asked(spec.knobs)
    entry = strategy_or_single(spec.knobs)
    machine = machine.used_by(devices)
    if entry.one_device:
        return 1
    if machine.device == "cuda":
        return len(chosen_gpus(spec.knobs, machine))
    if (processes := count_asked(devices)) is not None:
        return processes
    if entry.model_axes:
        return 2 * model_degree(spec.knobs)
    return min(MAX_CPU_PROCESSES, max(2, machine.cores))


def devices_asked(knobs: KnobValues) -> KnobValue:
    """The `devices` knob, or as many as the strategy itself asks for: one pipeline has pp_degree devices."""
    devices, entry = knobs["devices"], strategy_or_single(knobs)
    if devices in (None, CPU) and entry.model_axes and "dp" not in entry.axes:
        degree = model_degree(knobs)
        return degree if devices is None else f"{CPU}:{degree}"
    return devices


def chosen_gpus(knobs: KnobValues, machine: Machine) -> Gpus:
    """The GPUs that a run takes, none on a CPU. Raises UserError when the machine lacks them."""
    devices = devices_asked(knobs)
    machine = machine.used_by(devices)
    if machine.device != "cuda":
        return ()
    if isinstance(devices, int | str):
        return machine.named_or_counted_gpus(devices)
    return machine.default_gpus(strategy_or_single(knobs).name)


def first_gpu_name(spec: RunSpec, machine: Machine) -> str | None:
    """The name of the first GPU that a run takes; None on a CPU. Raises UserError for GPUs that do not exist."""
    gpus = chosen_gpus(spec.knobs, machine)
    return gpus[0].name if gpus else None


def recorded_devices(spec: RunSpec, machine: Machine) -> KnobValue:
    """The `devices` knob as a run records it: with an open number filled in. Raises UserError as `device_count`."""
    devices = spec.knobs["devices"]
    if devices is None:
        return device_count(spec, machine)
    return f"{CPU}:{device_count(spec, machine)}" if asks_for_cpu(devices) else devices


def with_devices(spec: RunSpec, machine: Machine) -> RunSpec:
    """The run with an open number of devices filled in where one process uses several.

    Raises UserError as `device_count`.
    """
    entry = strategy_or_single(spec.knobs)
    if not entry.one_process or entry.one_device or spec.knobs["devices"] is not None:
        return spec
    return replace(spec, knobs={**spec.knobs, "devices": device_count(spec, machine)})


def data_parallel_degree(knobs: KnobValues, devices: int) -> int:
    """Number of ranks, or groups of ranks, among which `devices` devices share out the global batch."""
    return max(1, devices // model_degree(knobs)) if "dp" in strategy_or_single(knobs).axes else 1


def ranks_with_samples(run: RunFile) -> int:
    """Number of ranks whose samples add up; the others of a run share theirs."""
    # Nothing tells how the ranks of a user's own script share a model: each counts.
    return run.world_size if run.script is not None else data_parallel_degree(run.knobs, run.world_size)


def model_degree(knobs: Mapping[str, Any]) -> int:
    """Number of devices that share one copy of the model by tensor or pipeline parallelism."""
    return math.prod(axis_degree(knobs, axis) for axis in strategy_or_single(knobs).model_axes)


def axis_degree(knobs: Mapping[str, Any], axis: str) -> int:
    """Number of devices along an axis that cuts the model, tp or pp."""
    return int(str(knobs.get(f"{axis}_degree") or 1))


def expected_mesh(knobs: Mapping[str, Any], devices: int) -> dict[str, int] | None:
    """The device mesh of a strategy on that many devices; None for a strategy without."""
    entry = strategy_or_single(knobs)
    # A pipeline's mesh has an axis dp, however many pipelines there are.
    axes = ("dp", *entry.model_axes) if entry.is_pipeline else entry.axes
    degrees = {axis: axis_degree(knobs, axis) for axis in entry.model_axes}
    sizes = {"dp": devices // model_degree(knobs), **degrees, "mp": devices}
    return {axis: sizes[axis] for axis in axes} or None


def global_batch(knobs: KnobValues, devices: int) -> int:
    """Samples of one optimizer step: batch_size x grad_accum x data-parallel degree."""
    return whole_number(knobs, "batch_size") * whole_number(knobs, "grad_accum") * data_parallel_degree(knobs, devices)


def first_size(config: Mapping[str, Any], *names: str) -> tuple[str, int]:
    """Return the first of these fields that is a whole number above zero, and its value; "" and 0 without any."""
    sizes = ((name, config.get(name)) for name in names)
    return next(((name, size) for name, size in sizes if isinstance(size, int) and size > 0), ("", 0))

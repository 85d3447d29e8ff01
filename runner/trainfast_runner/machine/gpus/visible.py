"""The devices listed by NVML that CUDA_VISIBLE_DEVICES leaves: by index, by UUID, or one MIG instance."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from trainfast_runner.errors import UserError
from trainfast_runner.machine.telemetry.topology import Instance, TopologyDevice
from trainfast_runner.records.tick import MIG_PREFIX, DeviceReading, is_instance

VISIBLE_DEVICES, DEVICE_ORDER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"
PCI_ORDER = "PCI_BUS_ID"
HIDE_ALL = ("", "-1", "none", "void", "NoDevFiles")
"""Values by which people and batch systems (Slurm) hide every GPU: the CPU was asked for."""
ON_THE_CPU = "devices=cpu to train on the CPU"
Device = TypeVar("Device", DeviceReading, TopologyDevice)


def visible_entries(environment: Mapping[str, str]) -> list[str] | None:
    """The entries of CUDA_VISIBLE_DEVICES; None when it is not set."""
    variable = environment.get(VISIBLE_DEVICES)
    return None if variable is None else [entry.strip() for entry in variable.split(",")]


def hides_all(environment: Mapping[str, str]) -> bool:
    """True if CUDA_VISIBLE_DEVICES asks for no GPU at all."""
    named_entries = visible_entries(environment)
    return named_entries is not None and named_entries[0] in HIDE_ALL


def visible_to(uuids: Iterable[str]) -> dict[str, str]:
    """The variables with which a process sees these GPUs alone, in this order.

    Without UUIDs the process sees no GPU.
    """
    return {DEVICE_ORDER: PCI_ORDER, VISIBLE_DEVICES: ",".join(uuids)}


def visible_gpus(gpus: Sequence[DeviceReading], *, by_index: bool = False) -> dict[str, str]:
    """The variables with which a process sees these GPUs alone, in this order.

    `by_index` names them by their indexes in PCI order, which are NVML's, for DeepSpeed: it reads the variable as
    integers (cuda_accelerator.py: _get_nvml_gpu_id). CUDA takes no mixture, so a GPU without a UUID decides for all.
    A MIG instance has a UUID only.
    """
    uuids = [gpu.uuid for gpu in gpus if gpu.uuid]
    if any(map(is_instance, uuids)) or (len(uuids) == len(gpus) and not by_index):
        return visible_to(uuids)
    return visible_to(str(gpu.index) for gpu in gpus)


def named_instance(environment: Mapping[str, str], instances: Sequence[Instance]) -> Instance | None:
    """The MIG instance that CUDA_VISIBLE_DEVICES names; None if it names none.

    CUDA gives a process one instance, the first. Raises UserError for a name that no instance has, and for one after
    another device.
    """
    named_entries = visible_entries(environment) or []
    first = next((entry for entry in named_entries if entry.startswith(MIG_PREFIX)), None)
    if first is None:
        return None
    if first != named_entries[0]:
        raise UserError(
            f"{VISIBLE_DEVICES}={','.join(named_entries)} mixes GPUs and MIG instances,"
            " and CUDA takes one or the other",
            key=VISIBLE_DEVICES,
            advice=f"{VISIBLE_DEVICES}={first}",
        )
    matching_instances = [
        instance for instance in instances if instance.uuid.startswith(first) or instance.old_name == first
    ]
    if len(matching_instances) == 1:
        return matching_instances[0]
    names = [instance.uuid for instance in instances]
    nearest_names = difflib.get_close_matches(first, names, n=1, cutoff=0.0)
    raise UserError(
        f"{VISIBLE_DEVICES}={first} names no MIG instance here" + ("" if names else ", and NVML lists none"),
        key=VISIBLE_DEVICES,
        allowed=names or None,
        nearest=nearest_names[0] if nearest_names else None,
        advice=None if nearest_names else f"one of `nvidia-smi -L`, or {ON_THE_CPU}",
    )


def visible_devices(
    devices: Sequence[Device], environment: Mapping[str, str], cuda_order: Callable[[], Sequence[str]]
) -> list[Device]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves, in its order; CUDA stops at the first entry that names none.

    `cuda_order` gives the UUIDs in CUDA's own order, by which CUDA counts unless CUDA_DEVICE_ORDER=PCI_BUS_ID. It is
    asked only where that order may differ from NVML's: among GPUs of several models. Raises UserError when it fails,
    and if a GPU is named twice: torch then sees none (`_parse_visible_devices` in torch/cuda/__init__.py).
    """
    gpus = [gpu for gpu in devices if not is_instance(gpu.uuid)]
    named_entries = visible_entries(environment)
    if named_entries is None:
        return gpus
    gpu_by_number = {gpu.index: gpu for gpu in gpus}
    is_numbered = any(entry.isdecimal() for entry in named_entries)
    if is_numbered and environment.get(DEVICE_ORDER) != PCI_ORDER and len({gpu.name for gpu in gpus}) > 1:
        by_uuid = {gpu.uuid: gpu for gpu in gpus}
        gpu_by_number = {position: by_uuid[uuid] for position, uuid in enumerate(cuda_order()) if uuid in by_uuid}
    chosen: list[Device] = []
    for entry in named_entries:
        if entry.isdecimal():
            matching_gpus = [gpu_by_number[int(entry)]] if int(entry) in gpu_by_number else []
        else:
            matching_gpus = [gpu for gpu in gpus if entry and gpu.uuid and gpu.uuid.startswith(entry)]
        if len(matching_gpus) != 1:
            break
        if matching_gpus[0] in chosen:
            fault = f"names GPU {matching_gpus[0].index} twice, so torch sees none"
            raise no_gpu_left_error(environment, fault, gpus)
        chosen += matching_gpus
    return chosen


def order_unknown_error(environment: Mapping[str, str], reason: str) -> UserError:
    """The refusal of numbers in CUDA's order when torch does not list that order."""
    return UserError(
        f"{VISIBLE_DEVICES}={environment[VISIBLE_DEVICES]} counts GPUs of several models in CUDA's order, which torch"
        f" cannot list ({reason})",
        key=VISIBLE_DEVICES,
        advice=f"{DEVICE_ORDER}={PCI_ORDER}, or the UUIDs of `nvidia-smi -L`",
    )


def no_gpu_left_error(environment: Mapping[str, str], fault: str, gpus: Sequence[Device]) -> UserError:
    """The refusal of a CUDA_VISIBLE_DEVICES that leaves no GPU and was not meant to hide them all."""
    return UserError(
        f"{VISIBLE_DEVICES}={environment[VISIBLE_DEVICES]} {fault}",
        key=VISIBLE_DEVICES,
        allowed=[str(gpu.index) for gpu in gpus],
        advice=f"{VISIBLE_DEVICES}={gpus[0].index}, or {ON_THE_CPU}",
    )

"""MIG: the instances into which GPUs are cut, as NVML lists them. A process trains on one instance, by its UUID."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from types import ModuleType

from trainfast_runner.machine.telemetry.binding import (
    answer_or_none,
    as_text,
    ask_once,
    gpu_count,
    possible_count,
    uuid_of,
)
from trainfast_runner.machine.telemetry.failures import NvmlError, NvmlFailure
from trainfast_runner.machine.telemetry.queries import Handle
from trainfast_runner.records.tick import MIG_PREFIX


@dataclass(frozen=True)
class Instance:
    """One MIG instance."""

    uuid: str
    name: str | None
    gpu_index: int
    gpu_uuid: str
    gpu_instance: int | None
    """Number of the instance within the GPU, as `compute_instance`; None if unknown."""
    compute_instance: int | None

    @property
    def old_name(self) -> str:
        """The instance's name before driver R470, which CUDA still takes."""
        return f"{MIG_PREFIX}{self.gpu_uuid}/{self.gpu_instance}/{self.compute_instance}"


def read_instances() -> list[Instance]:
    """Every instance of every GPU in MIG mode. Opens NVML for as long as that takes; empty when it does not answer."""
    instances = ask_once(
        lambda nv: [instance for index in range(gpu_count(nv)) for instance in _instances_of_gpu(nv, index)]
    )
    return [] if isinstance(instances, NvmlFailure) else instances


def _instances_of_gpu(nv: ModuleType, index: int) -> list[Instance]:
    """The instances of one GPU; empty when it does not answer or is not in MIG mode."""
    try:
        gpu = nv.nvmlDeviceGetHandleByIndex(index)
        slot_count = possible_count(nv, "mig_slot_count", partial(nv.nvmlDeviceGetMaxMigDeviceCount, gpu))
        gpu_uuid = nv.call(uuid_of, nv, gpu)
    except NvmlError:
        return []
    instances = []
    for slot in range(slot_count):
        # A slot without an instance answers NotFound.
        handle = answer_or_none(nv, partial(_handle_of_slot, nv, gpu, slot))
        if handle is not None and (instance := _instance(nv, handle, index, gpu_uuid)) is not None:
            instances.append(instance)
    return instances


def _handle_of_slot(nv: ModuleType, gpu: Handle, slot: int) -> Handle:
    return nv.nvmlDeviceGetMigDeviceHandleByIndex(gpu, slot)


def _instance(nv: ModuleType, handle: Handle, gpu_index: int, gpu_uuid: str) -> Instance | None:
    uuid = answer_or_none(nv, lambda: uuid_of(nv, handle))
    if uuid is None:
        return None
    return Instance(
        uuid=uuid,
        name=answer_or_none(nv, lambda: as_text(nv.nvmlDeviceGetName(handle))),
        gpu_index=gpu_index,
        gpu_uuid=gpu_uuid,
        gpu_instance=answer_or_none(nv, lambda: nv.nvmlDeviceGetGpuInstanceId(handle)),
        compute_instance=answer_or_none(nv, lambda: nv.nvmlDeviceGetComputeInstanceId(handle)),
    )

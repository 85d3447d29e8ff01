"""The devices to train on: the GPUs that CUDA_VISIBLE_DEVICES leaves, or the CPU."""

from __future__ import annotations

import dataclasses
import itertools
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from trainfast_runner.errors import UserError
from trainfast_runner.machine.telemetry.binding import NO_DEVICES, comes_from_a_driver
from trainfast_runner.machine.telemetry.nvml import Nvml
from trainfast_runner.records.json_lines import text_of
from trainfast_runner.records.tick import MIG_PREFIX, DeviceReading, is_instance
from trainfast_runner.units import CPU, asks_for_cpu, gpu_indexes, gpus_text
from trainfast_runner.worker.catalog import STRATEGIES

CUDA_BUILD, HIP_BUILD = "torch.version.cuda", "torch.version.hip"
Gpus = tuple[DeviceReading, ...]


@dataclasses.dataclass(frozen=True)
class Machine:
    """The devices of this machine."""

    device: str
    """cuda or cpu."""
    gpus: Gpus
    """The GPUs available to a run, in the order of CUDA_VISIBLE_DEVICES."""
    nvml_gpus: Gpus
    """All GPUs that the driver lists, and after them the MIG instances."""
    cores: int
    driver_version: str | None = None
    no_gpu_reason: str | None = None
    """The reason that `gpus` is empty, in a few words for use inside another sentence; `doctor` prints the cure."""
    refusal: UserError | None = None
    """The refusal of every run that does not ask for the CPU, when the choice among the GPUs is unknown."""

    def used_by(self, devices: object) -> Machine:
        """The machine as a run with this `devices` knob uses it: without its GPUs if that asks for the CPU."""
        if not asks_for_cpu(devices):
            return self
        return dataclasses.replace(self, device=CPU, gpus=(), no_gpu_reason=f"devices={devices}", refusal=None)

    def limited_to(self, uuids: Sequence[str]) -> Machine:
        """The machine reduced to the GPUs of these UUIDs. Raises UserError when one of them is gone."""
        gpus = tuple(gpu for gpu in self.gpus if gpu.uuid in uuids)
        if len(gpus) < len(set(uuids)):
            gone_uuid = next(uuid for uuid in uuids if uuid not in {gpu.uuid for gpu in gpus})
            raise UserError(f"GPU {gone_uuid} is not available any more", key="devices")
        return dataclasses.replace(self, gpus=gpus)

    def default_gpus(self, strategy: str) -> Gpus:
        """The GPUs of a run without a `devices` knob: the one with most free memory, or all. Raises UserError."""
        usable = self._usable_gpus()
        return _freest(usable, 1) if STRATEGIES[strategy].one_device else tuple(usable)

    def named_or_counted_gpus(self, devices: int | str) -> Gpus:
        """The GPUs of a run for its `devices` knob; of a count, those with most free memory. Raises UserError."""
        usable = self._usable_gpus()
        if isinstance(devices, str):
            return tuple(self._gpu_at(index) for index in gpu_indexes(devices) or ())
        if devices > (count := len(usable)):
            message = f"devices={devices}, but there {_count_phrase(count)}{self._mig_note()}"
            raise UserError(message, key="devices", allowed=[f"1 to {count}"], advice=f"devices={count}")
        return _freest(usable, devices)

    def watched(self, watch: object, used_gpus: Gpus) -> Gpus:
        """The GPUs whose readings are joined to a run with this `watch` knob, by NVML index. Raises UserError."""
        if watch is None:
            return used_gpus
        by_index = {gpu.index: gpu for gpu in self.nvml_gpus if not is_instance(gpu.uuid)}
        indexes = gpu_indexes(watch) or []
        for index in indexes:
            if index not in by_index:
                raise _no_such_gpu_error(f"watch={index}", index, len(by_index))
        return tuple(by_index[index] for index in indexes)

    def _usable_gpus(self) -> list[DeviceReading]:
        """The GPUs that answer and are not cut into instances. Raises UserError without any."""
        usable = [gpu for gpu in self.gpus if gpu.error is None and not _is_in_mig_mode(gpu)]
        if not usable:
            raise UserError("no usable GPU", key="devices", advice=ON_THE_CPU)
        return usable

    def _gpu_at(self, index: int) -> DeviceReading:
        """The GPU at this index among those a run may use. Raises UserError."""
        if index >= len(self.gpus):
            raise _no_such_gpu_error(f"devices={index}+", index, len(self.gpus))
        gpu = self.gpus[index]
        if gpu.error is not None:
            raise UserError(f"devices={index}+: that GPU does not answer: {gpu.error}", key="devices")
        if _is_in_mig_mode(gpu):
            raise _mig_mode_error([gpu], self.nvml_gpus, f"devices={index}+: ")
        return gpu

    def _mig_note(self) -> str:
        """Words about the GPUs that MIG takes away from a run; empty if none."""
        if any(is_instance(gpu.uuid) for gpu in self.gpus):
            return " (CUDA gives a process one MIG instance)"
        mig_indexes = [gpu.index for gpu in self.gpus if _is_in_mig_mode(gpu)]
        return f" ({gpus_text(mig_indexes)} in MIG mode not counted)" if mig_indexes else ""


def _is_in_mig_mode(gpu: DeviceReading) -> bool:
    """True for a GPU in MIG mode, which can be trained on by its instances only."""
    return gpu.mig_mode is True and not is_instance(gpu.uuid)


def detect_machine(versions: Mapping[str, str | None], *, environment: Mapping[str, str] | None = None) -> Machine:
    """The machine as a training Python can use it; `versions` are those of its `Inspection`.

    Raises nothing: an obstacle between a run and its GPUs is the machine's `refusal`.
    """
    environment = os.environ if environment is None else environment
    nvml = Nvml()
    readings, failure = sample_gpus(nvml), nvml.failure
    reason = "torch is a CPU build" if failure is None else failure.reason
    machine = Machine(CPU, (), tuple(readings), len(os.sched_getaffinity(0)), nvml.driver_version, reason)
    if (hip := versions.get(HIP_BUILD)) is not None:
        build = f"torch {versions.get('torch')} is a ROCm build (HIP {hip})"
        message = f"{build}: AMD GPUs are not supported, because NVML neither lists nor measures them"
        option = f"{ON_THE_CPU}, or --python with a CUDA build of torch"
        refusal = UserError(message, key="devices", advice=ON_THE_CPU, option=option)
        return dataclasses.replace(machine, no_gpu_reason="torch is a ROCm build", refusal=refusal)
    if versions.get(CUDA_BUILD) is None:
        return machine
    if (visible_entries(environment) or ["0"])[0] in HIDE_ALL:
        hidden_reason = f"{VISIBLE_DEVICES}={environment[VISIBLE_DEVICES]} leaves none"
        return dataclasses.replace(machine, no_gpu_reason=hidden_reason) if readings else machine
    try:
        if not readings:
            sentence = NO_DEVICES if failure is None else failure.sentence
            if comes_from_a_driver(sentence):
                raise UserError(f"NVML does not answer: {sentence}", key="devices", advice=ON_THE_CPU)
            if (sign := sign_of_a_gpu()) is not None:
                raise UserError(f"NVML lists no GPU, but {sign}: {sentence}", key="devices", advice=ON_THE_CPU)
            return machine
        gpus = visible_devices(machine.nvml_gpus, environment)
        if all(gpu.mig_mode is True for gpu in gpus):
            raise _mig_mode_error(gpus, machine.nvml_gpus)
    except UserError as error:
        return dataclasses.replace(machine, no_gpu_reason=error.message, refusal=error)
    return dataclasses.replace(machine, device="cuda", gpus=tuple(gpus))


def sample_gpus(nvml: Nvml) -> list[DeviceReading]:
    """Read every GPU and MIG instance once, and close NVML."""
    readings, _ = nvml.sample(time.monotonic_ns())
    nvml.close()
    return readings


def _freest(gpus: Sequence[DeviceReading], count: int) -> Gpus:
    """The `count` GPUs with most free memory, in the order of their indexes."""
    freest = sorted(gpus, key=lambda gpu: -(gpu.memory_free_bytes or 0))[:count]
    return tuple(sorted(freest, key=lambda gpu: gpu.index))


def _mig_mode_error(gpus: Sequence[DeviceReading], listed: Gpus, setting: str = "") -> UserError:
    """The refusal of GPUs in MIG mode, with the instances to name instead; `setting` begins the message."""
    indexes, names = [gpu.index for gpu in gpus], _instances(listed)
    message = f"{setting}{gpus_text(indexes)} {'is' if len(gpus) == 1 else 'are'} in MIG mode, where runs use an"
    message += f" instance by its name{'' if names else ', and there is none'}"
    cure = f"{VISIBLE_DEVICES}={names[0]}" if names else f"`sudo nvidia-smi -i {indexes[0]} -mig 0`, or {ON_THE_CPU}"
    return UserError(message, key="devices" if setting else VISIBLE_DEVICES, allowed=names or None, advice=cure)


def _no_such_gpu_error(setting: str, index: int, count: int) -> UserError:
    others = f"; there {_count_phrase(count)}" if count else " and no other one here"
    allowed = [f"0 to {count - 1}"] if count else []
    return UserError(f"{setting}: there is no GPU {index}{others}", key=setting.partition("=")[0], allowed=allowed)


def _count_phrase(count: int) -> str:
    return "is 1" if count == 1 else f"are {count}" if count else "is none"


VISIBLE_DEVICES, DEVICE_ORDER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"
DEVICE_VARIABLES = (VISIBLE_DEVICES, DEVICE_ORDER)
PCI_ORDER = "PCI_BUS_ID"
HIDE_ALL = ("", "-1", "none", "void", "NoDevFiles")
"""Values by which people and batch systems (Slurm) hide every GPU: the CPU was asked for."""
ON_THE_CPU = "devices=cpu to train on the CPU"


def visible_entries(environment: Mapping[str, str]) -> list[str] | None:
    """The entries of CUDA_VISIBLE_DEVICES; None when it is not set."""
    variable = environment.get(VISIBLE_DEVICES)
    return None if variable is None else [entry.strip() for entry in variable.split(",")]


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


def _instances(devices: Iterable[DeviceReading]) -> list[str]:
    """The UUIDs of the MIG instances among these."""
    return [device.uuid for device in devices if device.uuid is not None and is_instance(device.uuid)]


def visible_devices(devices: Sequence[DeviceReading], environment: Mapping[str, str]) -> list[DeviceReading]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves, in its order; CUDA stops at the first entry that names none.

    If a GPU is named twice, torch sees none (`_parse_visible_devices` in torch/cuda/__init__.py). CUDA counts the
    fastest GPU first unless CUDA_DEVICE_ORDER=PCI_BUS_ID. Raises UserError for numbers where that order may differ from
    NVML's, among GPUs of several models, and if no GPU is left. CUDA gives a process one MIG instance, the first named.
    """
    gpus = [gpu for gpu in devices if not is_instance(gpu.uuid)]
    entries = visible_entries(environment)
    if entries is None:
        return gpus
    setting = f"{VISIBLE_DEVICES}={environment[VISIBLE_DEVICES]}"
    if named := next((entry for entry in entries if entry.startswith(MIG_PREFIX)), None):
        if len(matching_gpus := _named(devices, named)) == 1:
            return matching_gpus
        instances = _instances(devices)
        message = f"{VISIBLE_DEVICES}={named} names no MIG instance here{'' if instances else ', and NVML lists none'}"
        advice = f"one of `nvidia-smi -L`, or {ON_THE_CPU}"
        raise UserError(message, key=VISIBLE_DEVICES, allowed=instances or None, advice=advice)
    is_numbered = any(entry.isdecimal() for entry in entries)
    if is_numbered and environment.get(DEVICE_ORDER) != PCI_ORDER and len({gpu.name for gpu in gpus}) > 1:
        message = f"{setting} counts GPUs of several models in CUDA's own order"
        advice = f"{DEVICE_ORDER}={PCI_ORDER}, or the UUIDs of `nvidia-smi -L`"
        raise UserError(message, key=VISIBLE_DEVICES, advice=advice)
    matches = (_named(gpus, entry) for entry in entries)
    chosen = [gpu for (gpu,) in itertools.takewhile(lambda matching: len(matching) == 1, matches)]
    if not chosen or len({gpu.index for gpu in chosen}) < len(chosen):
        indexes, advice = [str(gpu.index) for gpu in gpus], f"{VISIBLE_DEVICES}={gpus[0].index}, or {ON_THE_CPU}"
        raise UserError(
            f"{setting} names no GPU here, or one twice", key=VISIBLE_DEVICES, allowed=indexes, advice=advice
        )
    return chosen


def _named(devices: Iterable[DeviceReading], entry: str) -> list[DeviceReading]:
    """The devices that an entry of CUDA_VISIBLE_DEVICES may name: by its index, or the beginning of its UUID."""
    if entry.isdecimal():
        return [device for device in devices if device.index == int(entry)]
    return [device for device in devices if entry and device.uuid is not None and device.uuid.startswith(entry)]


NVIDIA_VENDOR, DISPLAY_CLASS = "0x10de", "0x03"
"""PCI vendor, and the PCI class of display and 3D controllers."""


def sign_of_a_gpu(root: Path = Path("/")) -> str | None:
    """The first sign that an NVIDIA GPU is here, in words; None without any."""
    node = next((path.name for path in sorted(root.glob("dev/nvidia[0-9]*"))), None)
    return pci_card(root) if node is None else f"/dev/{node} is there"


def pci_card(root: Path = Path("/")) -> str | None:
    """The first NVIDIA display or 3D controller on the PCI bus, with or without a driver; None without one."""
    for entry in sorted(root.glob("sys/bus/pci/devices/*")):
        vendor, kind = (text_of(entry / name).strip() for name in ("vendor", "class"))
        if vendor == NVIDIA_VENDOR and kind.startswith(DISPLAY_CLASS):
            return f"the PCI bus lists {entry.name}"
    return None

"""What there is to train on: the GPUs CUDA_VISIBLE_DEVICES leaves, or the CPU as the device."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trainfast_runner.problem import Problem
from trainfast_runner.telemetry.nvml import Nvml
from trainfast_runner.telemetry.readings import DeviceReading

MOST_CPU_PROCESSES = 8
PART_OF_A_GPU = (
    "is an instance of a GPU (MIG), and runs use whole GPUs: of a part the driver gives no clocks, power or temperature"
)
NO_MIG = "CUDA_VISIBLE_DEVICES=0 and `sudo nvidia-smi -i 0 -mig 0`, or leave it empty for the CPU"
CPU_INFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class Machine:
    """`device` is what training runs on: "cuda" or "cpu".

    `gpus` are those a run may use, in PCI order; `nvml_gpus` all the driver lists; `missing` says why there is none.
    """

    device: str
    gpus: tuple[DeviceReading, ...]
    nvml_gpus: tuple[DeviceReading, ...]
    cores: int
    driver_version: str | None = None
    missing: str | None = None
    mig_instance: str | None = None
    """What CUDA_VISIBLE_DEVICES names of MIG, where runs would have a GPU but for that."""

    def refuse_mig(self) -> None:
        """Raise Problem where CUDA_VISIBLE_DEVICES names a MIG instance: a run must not fall back on the CPU for it."""
        if self.mig_instance is not None:
            raise Problem(
                f"CUDA_VISIBLE_DEVICES={self.mig_instance} {PART_OF_A_GPU}", key="CUDA_VISIBLE_DEVICES", advice=NO_MIG
            )

    @property
    def why_no_gpu(self) -> str:
        """In a few words, for a sentence about something else; `doctor` has the cure."""
        return self.missing.partition(":")[0].partition(". ")[0] if self.missing else "torch is a CPU build"

    def choose(self, devices: int | str | None, strategy: str) -> tuple[DeviceReading, ...]:
        """The GPUs of a run for the `devices` knob. Raises Problem naming what there is."""
        usable = [gpu for gpu in self.gpus if gpu.error is None]
        if not usable:
            raise Problem("no GPU answers", key="devices")
        if devices is None:
            if strategy != "single":
                return tuple(usable)
            return (max(usable, key=lambda gpu: gpu.memory_free_bytes or 0),)
        if isinstance(devices, int):
            if devices > len(usable):
                raise Problem(
                    f"devices={devices}, but there {_are(len(usable))}",
                    key="devices",
                    allowed=[f"1 to {len(usable)}"],
                    advice=f"devices={len(usable)}",
                )
            by_free = sorted(usable, key=lambda gpu: -(gpu.memory_free_bytes or 0))
            return tuple(sorted(by_free[:devices], key=lambda gpu: gpu.index))
        return tuple(_at(self.gpus, index, "devices") for index in _indexes(devices))

    def watched(self, watch: str | None, used: tuple[DeviceReading, ...]) -> tuple[DeviceReading, ...]:
        """The GPUs whose readings are joined to a run, by NVML index. Raises Problem."""
        if watch is None:
            return used
        return tuple(_at(self.nvml_gpus, index, "watch") for index in _indexes(watch))


def cpu_has_fp16() -> bool:
    """Whether this CPU multiplies fp16 itself (by AVX512-FP16, which is what torch's oneDNN asks for)."""
    try:
        return "avx512_fp16" in CPU_INFO.read_text()
    except OSError:
        return False


def look(torch_version: str | None, environment: Mapping[str, str] | None = None) -> Machine:
    """The machine as a training Python with this torch build can use it; a build for the CPU has no GPU."""
    environment = os.environ if environment is None else environment
    nvml = Nvml()
    readings, missing = nvml.sample(time.monotonic_ns())
    nvml.close()
    variable = environment.get("CUDA_VISIBLE_DEVICES")
    visible = _visible(readings, variable)
    has_cuda = torch_version is not None and "+cpu" not in torch_version
    gpus = tuple(visible) if has_cuda else ()
    hidden = f"CUDA_VISIBLE_DEVICES={variable} leaves none" if readings and not visible else None
    return Machine(
        device="cuda" if gpus else "cpu",
        gpus=gpus,
        nvml_gpus=tuple(readings),
        cores=len(os.sched_getaffinity(0)),
        driver_version=nvml.driver_version,
        missing=missing.get("nvml") or hidden,
        mig_instance=mig_instance(variable or "") if has_cuda and readings else None,
    )


def mig_instance(variable: str) -> str | None:
    """The first entry that is a MIG instance: MIG-UUID, or MIG-GPU-UUID/GI/CI before R470."""
    return next((entry.strip() for entry in variable.split(",") if entry.strip().startswith("MIG-")), None)


def _visible(readings: list[DeviceReading], variable: str | None) -> list[DeviceReading]:
    """What CUDA_VISIBLE_DEVICES leaves: indexes in PCI order or UUID prefixes; CUDA stops at the first bad entry."""
    if variable is None:
        return readings
    chosen: list[DeviceReading] = []
    for entry in variable.split(","):
        entry = entry.strip()
        if entry.isdigit():
            matching = [gpu for gpu in readings if gpu.index == int(entry)]
        else:
            matching = [gpu for gpu in readings if entry and gpu.uuid and gpu.uuid.startswith(entry)]
        if len(matching) != 1:
            break
        chosen += matching
    return chosen


def _indexes(text: int | str) -> list[int]:
    return [int(part) for part in str(text).split("+") if part]


def _at(gpus: tuple[DeviceReading, ...], index: int, key: str) -> DeviceReading:
    if key == "devices":
        if index < len(gpus):
            if gpus[index].error is not None:
                raise Problem(f"devices={index}+: that GPU does not answer: {gpus[index].error}", key=key)
            return gpus[index]
    else:
        for gpu in gpus:
            if gpu.index == index:
                return gpu
    others = f"; there {_are(len(gpus))}" if gpus else " and no other one here"
    raise Problem(
        f"{key}={index}{'+' if key == 'devices' else ''}: there is no GPU {index}{others}",
        key=key,
        allowed=[f"0 to {len(gpus) - 1}"] if gpus else [],
    )


def _are(count: int) -> str:
    return "is 1" if count == 1 else f"are {count}" if count else "is none"

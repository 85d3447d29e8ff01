"""The findings of `doctor` about the GPUs: their number, their use by torch, and missing readings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from trainfast_runner.errors import UserError
from trainfast_runner.machine.devices import CUDA_BUILD, HIP_BUILD
from trainfast_runner.machine.doctor.finding import Finding, State
from trainfast_runner.machine.gpus.health import defects
from trainfast_runner.machine.gpus.presence import pci_card
from trainfast_runner.machine.processes import sees_host_pids
from trainfast_runner.machine.telemetry.binding import LIBRARY_FAILURES, LIBRARY_NOT_FOUND, NvmlFailure
from trainfast_runner.machine.telemetry.plausible import energy_doubt
from trainfast_runner.records.tick import DeviceReading, Tick
from trainfast_runner.units import gibibytes


def gpu_findings(
    tick: Tick,
    versions: Mapping[str, str | None],
    refusal: UserError | None = None,
    failure: NvmlFailure | None = None,
) -> Iterator[Finding]:
    """Findings about NVML, every GPU, their use by this build of torch, and missing readings.

    `refusal` is `Machine.refusal` for the training Python; `failure` is NVML's in this tick.
    """
    if failure is not None and not tick.devices:
        no_library = failure == LIBRARY_FAILURES[LIBRARY_NOT_FOUND]
        state: State = "ok" if no_library and pci_card() is None else "warn"
        trains = "No run starts but with devices=cpu" if refusal is not None else "Training runs on the CPU"
        yield Finding("GPU", state, f"none: {failure.reason}. {trains}", failure.cure)
    for gpu in tick.devices:
        if gpu.error:
            yield Finding(f"GPU {gpu.index}", "warn", f"{gpu.name or 'a GPU'}: {gpu.error}")
        else:
            memory = f", {gibibytes(gpu.memory_total_bytes)}" if gpu.memory_total_bytes else ""
            yield Finding(f"GPU {gpu.index}", "ok", f"{gpu.name or 'a GPU whose name cannot be read'}{memory}")
            for defect in defects(gpu):
                yield Finding(f"GPU {gpu.index}", "warn", defect.finding, defect.cure)
    if tick.devices and not sees_host_pids():
        yield Finding(
            "GPU processes",
            "ok",
            "this is a container: the driver lists the host's process ids, so the owner of a process that starts during"
            " a run is unknown",
        )
    torch = versions.get("torch")
    is_cpu_build = versions.get(CUDA_BUILD) is None and versions.get(HIP_BUILD) is None
    if tick.devices and torch is not None and is_cpu_build:
        yield Finding(
            "GPU and torch",
            "warn",
            f"torch {torch} is a build for the CPU: it will not use the GPUs",
            "pip install --force-reinstall torch, from the index https://pytorch.org names for your driver",
        )
    if refusal is not None:
        yield Finding("devices", "fail", refusal.message, refusal.advice)
    yield from _missing_readings(tick)


def energy_findings(before: Tick, after: Tick) -> Iterator[Finding]:
    """Energy counters that disagree with the power of their GPU, from two ticks."""
    earlier = {gpu.uuid or gpu.index: gpu for gpu in before.devices}
    for gpu in after.devices:
        first = earlier.get(gpu.uuid or gpu.index)
        doubt = None if first is None else _energy_doubt(first, gpu)
        if doubt is not None:
            yield Finding(
                f"GPU {gpu.index} energy",
                "warn",
                f"{doubt}: runs give no energy of this GPU",
                "update the NVIDIA driver, or restart the machine; nothing but the energy is affected",
            )


def _energy_doubt(first: DeviceReading, last: DeviceReading) -> str | None:
    if first.t_ns is None or last.t_ns is None or first.energy_mj is None or last.energy_mj is None:
        return None
    # A counter that went back was reset in between.
    if first.power_w is None or last.power_w is None or last.energy_mj < first.energy_mj:
        return None
    seconds = (last.t_ns - first.t_ns) / 1e9
    return energy_doubt((last.energy_mj - first.energy_mj) / 1e3, (first.power_w + last.power_w) / 2 * seconds, seconds)


def _missing_readings(tick: Tick) -> Iterator[Finding]:
    """Missing readings, grouped by the reason, so that eight GPUs make one line."""
    by_reason: dict[str, dict[str, list[int]]] = {}
    for key, reason in tick.missing.items():
        owner, _, reading = key.partition(".")
        if not reading:
            continue
        gpus = by_reason.setdefault(reason, {}).setdefault(reading if owner.startswith("gpu") else key, [])
        if owner.startswith("gpu"):
            gpus.append(int(owner.removeprefix("gpu")))
    everyone = [gpu.index for gpu in tick.devices if not gpu.error]
    for reason, readings in by_reason.items():
        names = [
            name if not gpus or gpus == everyone else f"{name} (GPU {', '.join(map(str, gpus))})"
            for name, gpus in readings.items()
        ]
        yield Finding("missing readings", "ok", f"{', '.join(names)}: {reason}")
    if not tick.devices:
        yield Finding("missing readings", "ok", "every reading of a GPU: there is none to read")
    else:
        yield Finding("missing readings", "ok", "the temperature of the chip's hot spot: NVML gives it for no GPU")

"""Defects of a GPU that answers: throttling now, memory errors, a narrow link; each with its cure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trainfast_runner.machine.telemetry import throttle
from trainfast_runner.machine.telemetry.throttle import degrees_left
from trainfast_runner.records.tick import DeviceReading

BUSY_PERCENT = 50
"""GPU utilization from which a lower PCIe generation does not save power."""
COOLING_CURE = "more air, a free slot beside the card, a lower power limit"
POWER_SUPPLY_CURE = "the power supply, its cables and rails: the brake is pulled from outside the card"
THROTTLING_CURES = {"sw_thermal": COOLING_CURE, "hw_thermal": COOLING_CURE, "hw_power_brake": POWER_SUPPLY_CURE}
RESEAT_CURE = "reseat the card or its riser, try another slot, or the slot's setting in the firmware"
RESET_CURE = "end its processes and run `sudo nvidia-smi --gpu-reset`, or reboot; if it comes again, replace the card"


@dataclass(frozen=True)
class Defect:
    """One defect in words, with its cure."""

    finding: str
    cure: str


def defects(gpu: DeviceReading) -> Iterator[Defect]:
    """Findings in one reading: throttling first, then memory errors and the link."""
    yield from _throttling(gpu)
    yield from _memory(gpu)
    yield from _link(gpu)


def _throttling(gpu: DeviceReading) -> Iterator[Defect]:
    reasons = [name for name in gpu.throttle_reasons or () if throttle.severity(name) == "warning"]
    # The general bit is set together with the bit of the cause.
    if len(reasons) > 1 and "hw_slowdown" in reasons:
        reasons.remove("hw_slowdown")
    at = "" if gpu.temperature_c is None else f", at {gpu.temperature_c} °C"
    for name in reasons:
        yield Defect(
            f"slowed down now: {throttle.cause_text(name)}{at}",
            THROTTLING_CURES.get(name, f"{COOLING_CURE}; or {POWER_SUPPLY_CURE}"),
        )
    headroom_c = degrees_left(gpu)
    if not reasons and headroom_c is not None and headroom_c <= 0:
        yield Defect(f"at its temperature limit{at}: it is about to slow down", COOLING_CURE)


def _memory(gpu: DeviceReading) -> Iterator[Defect]:
    """Memory errors by NVIDIA's GPU Memory Error Management guide: pending resets, and cards to replace."""
    if gpu.remapped_rows_failed:
        yield Defect("a row of its memory could not be replaced", "replace this card")
    if gpu.remapped_rows_pending:
        yield Defect("rows of its memory wait to be replaced", RESET_CURE)
    if gpu.ecc_uncorrected_errors:
        yield Defect(
            f"{gpu.ecc_uncorrected_errors:,} uncorrected memory errors since the driver was loaded", RESET_CURE
        )
    if gpu.remapped_rows_uncorrected:
        yield Defect(
            f"{gpu.remapped_rows_uncorrected:,} rows of its memory were replaced for uncorrectable errors",
            "check that the number does not grow: nvidia-smi -q -d ROW_REMAPPER",
        )


def _link(gpu: DeviceReading) -> Iterator[Defect]:
    width, widest = gpu.pcie_width, gpu.pcie_width_max
    if width is not None and widest is not None and width < widest:
        yield Defect(f"{width} of its {widest} PCIe lanes", RESEAT_CURE)
    generation, generation_max = gpu.pcie_generation, gpu.pcie_generation_max
    if (
        generation is not None
        and generation_max is not None
        and generation < generation_max
        and (gpu.gpu_utilization_percent or 0) >= BUSY_PERCENT
    ):
        yield Defect(f"PCIe generation {generation} of {generation_max} under load", RESEAT_CURE)

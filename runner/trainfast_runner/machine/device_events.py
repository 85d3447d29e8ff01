"""The devices of a run: defects in one reading, each with its cure, and changes between two ticks, as events."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from trainfast_runner.machine.processes import own_pids, read_stat, sees_host_pids
from trainfast_runner.machine.telemetry import throttle
from trainfast_runner.machine.telemetry.throttle import severity
from trainfast_runner.records.run_lines import Event
from trainfast_runner.records.tick import DeviceProcess, DeviceReading, Tick
from trainfast_runner.units import gibibytes, mebibytes

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
    """Findings in one reading: throttling first, then memory errors and the link.

    Memory errors by NVIDIA's GPU Memory Error Management guide: pending resets, and cards to replace.
    """
    yield from _throttling(gpu)
    width, width_max, generation, generation_max = (
        getattr(gpu, f"pcie_{name}") or 0 for name in ("width", "width_max", "generation", "generation_max")
    )
    slow = (gpu.gpu_utilization_percent or 0) >= BUSY_PERCENT and 0 < generation < generation_max
    errors, rows = gpu.ecc_uncorrected_errors or 0, gpu.remapped_rows_uncorrected or 0
    rows_cure = "check that the number does not grow: nvidia-smi -q -d ROW_REMAPPER"
    findings = (
        (gpu.remapped_rows_failed, "a row of its memory could not be replaced", "replace this card"),
        (gpu.remapped_rows_pending, "rows of its memory wait to be replaced", RESET_CURE),
        (errors, f"{errors:,} uncorrected memory errors since the driver was loaded", RESET_CURE),
        (rows, f"{rows:,} rows of its memory were replaced for uncorrectable errors", rows_cure),
        (0 < width < width_max, f"{width} of its {width_max} PCIe lanes", RESEAT_CURE),
        (slow, f"PCIe generation {generation} of {generation_max} under load", RESEAT_CURE),
    )
    yield from (Defect(finding, cure) for is_found, finding, cure in findings if is_found)


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
    headroom_c = gpu.degrees_to_slowdown_c
    if not reasons and headroom_c is not None and headroom_c <= 0:
        yield Defect(f"at its temperature limit{at}: it is about to slow down", COOLING_CURE)


class DeviceEvents:
    """Compares each tick with the one before it, for the devices in `watched` (UUIDs).

    This process and all below it are the training. If ids cannot be compared (in a container the driver lists the
    host's), a process is foreign only if it was there at the first tick, before the training.
    With `all_foreign` every process is, because the training is not on these devices.
    """

    def __init__(self, watched: Iterable[str], *, all_foreign: bool = False) -> None:
        self._watched = frozenset(watched)
        self._all_foreign = all_foreign
        self._lost: set[int] = set()
        self._throttled: dict[int, frozenset[str]] = {}
        self._processes: dict[int, dict[int, DeviceProcess]] = {}
        """The processes of the last tick, by the GPU's index."""
        self._foreign: dict[int, set[int]] = {}
        self._indexes: frozenset[int] | None = None

    def concerns(self, index: int) -> bool:
        """True if the GPU with this index is one of the run's; before the first tick any may be."""
        return self._indexes is None or index in self._indexes

    def since_last(self, tick: Tick) -> list[Event]:
        """Events since the last tick: throttling began or ended, a device was lost or came back, a foreign process
        appeared or left."""
        watched = [device for device in tick.devices if device.uuid in self._watched]
        self._indexes = frozenset(device.index for device in watched)
        return [event for device in watched for event in self._of_device(device, tick.t_ns)]

    def _of_device(self, device: DeviceReading, t_ns: int) -> Iterator[Event]:
        if (device.error is not None) != (device.index in self._lost):
            self._lost ^= {device.index}
            kind = "gpu_back" if device.error is None else "gpu_lost"
            yield Event(t_ns=t_ns, kind=kind, device=device.index, detail=device.error)
        if device.throttle_reasons is not None:
            yield from self._throttling(device.index, device.throttle_reasons, t_ns)
        if device.processes is not None:
            processes = {process.pid: process for process in device.processes}
            for change, process in self._foreigners(device.index, processes):
                yield _process_event(device.index, t_ns, change, process)

    def _throttling(self, index: int, names: Iterable[str], t_ns: int) -> Iterator[Event]:
        """An event for each reason of throttling that began or ended."""
        reasons = frozenset(name for name in names if severity(name) != "none")
        before, self._throttled[index] = self._throttled.get(index, frozenset()), reasons
        for kind, changed in (("throttle_on", reasons - before), ("throttle_off", before - reasons)):
            yield from (Event(t_ns=t_ns, kind=kind, device=index, detail=name) for name in sorted(changed))

    def _foreigners(self, index: int, processes: dict[int, DeviceProcess]) -> list[tuple[str, DeviceProcess]]:
        """The foreign processes that appeared or left, each after its change."""
        is_first, previous = index not in self._processes, self._processes.get(index, {})
        self._processes[index] = processes
        appeared = processes.keys() - previous.keys()
        if not self._all_foreign:
            appeared = appeared - own_pids() if appeared and (is_first or sees_host_pids()) else set()
        known = self._foreign.get(index, set()) | appeared
        self._foreign[index] = known & processes.keys()
        left = [("left", previous[pid]) for pid in sorted(known - processes.keys())]
        return [*(("appeared", processes[pid]) for pid in sorted(appeared)), *left]


def _process_event(index: int, t_ns: int, change: str, process: DeviceProcess) -> Event:
    """The event of a process that appeared on a GPU or left it, with its name; `change` is appeared or left."""
    pid, used_bytes, kind = process.pid, process.memory_used_bytes, "foreign_process"
    in_words = gibibytes if (used_bytes or 0) >= 2**30 else mebibytes
    memory = "" if used_bytes is None else f" with {in_words(used_bytes)}"
    label = f"process {pid} of the host"
    if sees_host_pids():
        label = f"{stat.name if (stat := read_stat(pid)) else 'a process'} (pid {pid})"
    detail = f"{label}{memory} {change}"
    return Event(t_ns=t_ns, kind=kind, device=index, pid=pid, state=change, detail=detail, memory_used_bytes=used_bytes)

"""The devices of a run: defects in one reading, each with its cure, and changes between two ticks, as events."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from trainfast_runner.machine.processes import own_pids, sees_host_pids
from trainfast_runner.machine.telemetry import throttle
from trainfast_runner.machine.telemetry.throttle import degrees_left, severity
from trainfast_runner.records.run_lines import Event
from trainfast_runner.records.tick import DeviceProcess, DeviceReading, Tick
from trainfast_runner.units import process_memory

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
    busy = (gpu.gpu_utilization_percent or 0) >= BUSY_PERCENT
    errors, rows = gpu.ecc_uncorrected_errors or 0, gpu.remapped_rows_uncorrected or 0
    rows_cure = "check that the number does not grow: nvidia-smi -q -d ROW_REMAPPER"
    for is_found, finding, cure in (
        (gpu.remapped_rows_failed, "a row of its memory could not be replaced", "replace this card"),
        (gpu.remapped_rows_pending, "rows of its memory wait to be replaced", RESET_CURE),
        (errors, f"{errors:,} uncorrected memory errors since the driver was loaded", RESET_CURE),
        (rows, f"{rows:,} rows of its memory were replaced for uncorrectable errors", rows_cure),
        (0 < width < width_max, f"{width} of its {width_max} PCIe lanes", RESEAT_CURE),
        (
            busy and 0 < generation < generation_max,
            f"PCIe generation {generation} of {generation_max} under load",
            RESEAT_CURE,
        ),
    ):
        if is_found:
            yield Defect(finding, cure)


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


class DeviceChanges:
    """Compares each reading of a device with the one before it."""

    def __init__(self) -> None:
        self._lost: set[int] = set()
        self._throttled: dict[str, frozenset[str]] = {}

    def lost_or_back(self, device: DeviceReading, t_ns: int) -> list[Event]:
        """Return the event of a device that no longer answers, or answers again; empty without a change."""
        if (device.error is not None) == (device.index in self._lost):
            return []
        self._lost ^= {device.index}
        kind = "gpu_back" if device.error is None else "gpu_lost"
        return [Event(t_ns=t_ns, kind=kind, device=device.index, detail=device.error)]

    def throttling(self, device: DeviceReading, t_ns: int) -> list[Event]:
        """Return an event for each reason of throttling that began or ended; empty without a reading of reasons."""
        if device.throttle_reasons is None:
            return []
        key = device.uuid or str(device.index)
        reasons = frozenset(name for name in device.throttle_reasons if severity(name) != "none")
        previous_reasons = self._throttled.get(key, frozenset())
        self._throttled[key] = reasons
        return [
            Event(t_ns=t_ns, kind=kind, device=device.index, detail=name)
            for kind, names in (
                ("throttle_on", reasons - previous_reasons),
                ("throttle_off", previous_reasons - reasons),
            )
            for name in sorted(names)
        ]


class DeviceEvents:
    """Compares each tick with the one before it, for the devices in `watched` (UUIDs).

    This process and all below it are the training. If ids cannot be compared (in a container the driver lists the
    host's), a process is foreign only if it was there at the first tick, before the training.
    With `all_foreign` every process is, because the training is not on these devices.
    """

    def __init__(self, watched: Iterable[str], *, all_foreign: bool = False) -> None:
        self._watched = frozenset(watched)
        self._all_foreign = all_foreign
        self._changes = DeviceChanges()
        self._processes: dict[str, dict[int, DeviceProcess]] = {}
        """The processes of the last tick, by UUID."""
        self._foreign: dict[str, set[int]] = {}
        self._slowed = False
        self._indexes: frozenset[int] | None = None

    def concerns(self, index: int) -> bool:
        """True if the GPU with this index is one of the run's; before the first tick any may be."""
        return self._indexes is None or index in self._indexes

    def since_last(self, tick: Tick) -> list[Event]:
        """Events since the last tick: throttling began or ended, a device was lost or came back, a foreign process
        appeared or left, the sampling slowed itself."""
        watched = [device for device in tick.devices if device.uuid in self._watched]
        all_of_ours = [*watched, *self._never_seen(tick)]
        self._indexes = frozenset(device.index for device in all_of_ours)
        events = self._sampling(tick)
        for device in all_of_ours:
            events += self._changes.lost_or_back(device, tick.t_ns)
        for device in watched:
            events += self._changes.throttling(device, tick.t_ns)
            events += self._foreigners(device, device.uuid or "", tick.t_ns)
        return events

    def _sampling(self, tick: Tick) -> list[Event]:
        sentence = tick.missing.get("sampler.period")
        was, self._slowed = self._slowed, sentence is not None
        return [Event(t_ns=tick.t_ns, kind="trouble", detail=sentence)] if sentence is not None and not was else []

    def _never_seen(self, tick: Tick) -> list[DeviceReading]:
        """Devices of the run that were lost before their UUID was read; empty when they may be another run's."""
        unknown = [device for device in tick.devices if device.uuid is None and device.error is not None]
        missing = self._watched - {device.uuid for device in tick.devices}
        return unknown if len(unknown) == len(missing) else []

    def _foreigners(self, device: DeviceReading, uuid: str, t_ns: int) -> list[Event]:
        if device.processes is None:
            return []
        processes = {process.pid: process for process in device.processes}
        previous = self._processes.get(uuid)
        self._processes[uuid] = processes
        foreign = self._foreign.setdefault(uuid, set())
        appeared = processes.keys() - (previous or {}).keys()
        if not self._all_foreign:
            appeared = appeared - own_pids() if appeared and (previous is None or sees_host_pids()) else set()
        foreign |= appeared
        gone = foreign - processes.keys()
        foreign -= gone
        event = partial(process_event, device.index, t_ns, kind="foreign_process")
        return [
            *(event("appeared", processes[pid]) for pid in sorted(appeared)),
            *(event("left", (previous or {})[pid]) for pid in sorted(gone)),
        ]


def process_event(index: int, t_ns: int, change: str, process: DeviceProcess, *, kind: str) -> Event:
    """The event of a process that appeared on a GPU or left it, with its name; `change` is appeared or left."""
    used_bytes = process.memory_used_bytes
    memory = "" if used_bytes is None else f" with {process_memory(used_bytes)}"
    is_visible = sees_host_pids()
    label = f"{_process_name(process.pid)} (pid {process.pid})" if is_visible else f"process {process.pid} of the host"
    return Event(
        t_ns=t_ns,
        kind=kind,
        device=index,
        pid=process.pid,
        state=change,
        detail=f"{label}{memory} {change}",
        memory_used_bytes=used_bytes,
    )


def _process_name(pid: int) -> str:
    """The kernel's name of the process; "a process" when it has ended or is hidden."""
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip() or "a process"
    except OSError:
        return "a process"

"""The request for a prediction of the next run: its spec, and the memory that is free for it now."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import msgspec

from trainfast_runner.errors import UserError

if TYPE_CHECKING:
    from trainfast_runner.machine.devices import Machine
    from trainfast_runner.records.tick import Tick
    from trainfast_runner.running.follower import RunSnapshot
    from trainfast_runner.settings.spec import RunSpec
    from trainfast_tui.live.snapshot import Snapshot
    from trainfast_tui.next_run.next_run import NextRun


SpeedKey = tuple[object, ...]
"""A value that changes with the runs and searches that speeds are predicted from."""
MOVED_SHARE = 0.01
"""Chosen, not measured: a smaller change of free memory is noise of an idle machine, and starts no prediction."""


class PredictionRequest(msgspec.Struct, frozen=True):
    """The spec to predict for, and the machine with the memory that is free now."""

    spec: RunSpec
    machine: Machine
    free_bytes: int | None
    """Free memory of the host now."""
    may_trace: bool
    """False while a run is measured: a trace would take its CPU."""
    reference: RunSpec | None = None
    """The spec to compare with (`NextRun.reference_spec`); None if no knob differs from it."""
    speed_key: SpeedKey = ()
    """Changes when there are new runs or searches to predict the speed from."""


def free_memory_bytes(machine: Machine, snapshot: Snapshot | None) -> tuple[int | None, ...]:
    """Return the memory that the host and each GPU have free for the next run; empty without a reading of the host."""
    tick = snapshot.tick if snapshot is not None else None
    if snapshot is None or tick is None or (host_bytes := _host_free_bytes(tick, snapshot.live_run)) is None:
        return ()
    return host_bytes, *(gpu.memory_free_bytes for gpu in _with_free_memory(machine, tick, snapshot.live_run).gpus)


def has_moved(before: tuple[int | None, ...], after: tuple[int | None, ...]) -> bool:
    """True if free memory of the host or of a GPU has changed by `MOVED_SHARE`, or a reading has come or gone."""
    if len(before) != len(after):
        return True
    return any(
        old_bytes != new_bytes
        and (old_bytes is None or new_bytes is None or abs(new_bytes - old_bytes) >= MOVED_SHARE * old_bytes)
        for old_bytes, new_bytes in zip(before, after, strict=True)
    )


def request_for(
    next_run: NextRun, machine: Machine, snapshot: Snapshot | None, *, may_trace: bool, speed_key: SpeedKey = ()
) -> PredictionRequest:
    """Return the request for the next run, with the memory that is free by the newest sample."""
    tick = snapshot.tick if snapshot is not None else None
    reference = next_run.reference_spec()
    spec, free_bytes = spec_on(machine, next_run), None
    machine = machine.used_by(next_run.spec.knobs["devices"])
    if tick is not None:
        live_run = snapshot.live_run if snapshot is not None else None
        machine, free_bytes = _with_free_memory(machine, tick, live_run), _host_free_bytes(tick, live_run)
    return PredictionRequest(spec, machine, free_bytes, may_trace, reference, speed_key)


def spec_on(machine: Machine, next_run: NextRun) -> RunSpec:
    """Return the spec with the number of devices on this machine.

    They are unchanged if the devices are refused, which the run's start reports.
    """
    from trainfast_runner.settings.device_counts import with_devices

    spec = next_run.spec
    try:
        return with_devices(spec, machine.used_by(spec.knobs["devices"]))
    except UserError:
        return spec


def _host_free_bytes(tick: Tick, live_run: RunSnapshot | None) -> int | None:
    """Return the free memory of the host in bytes; the memory of a live run is free again when the next one starts."""
    host = tick.host
    if host.memory_available_bytes is None:
        return None
    run_bytes = host.run.memory_rss_bytes if live_run is not None and host.run is not None else None
    return host.memory_available_bytes + (run_bytes or 0)


def _with_free_memory(machine: Machine, tick: Tick, live_run: RunSnapshot | None) -> Machine:
    """Return the machine with the memory that its GPUs have free now, or had before the live run."""
    readings = {device.uuid: device for device in tick.devices if device.uuid}
    before = live_run.run_file.used_before_bytes if live_run is not None and live_run.run_file is not None else {}
    gpus = []
    for gpu in machine.gpus:
        reading = readings.get(gpu.uuid or "")
        if reading is not None and reading.memory_free_bytes is not None:
            used, used_before = reading.memory_used_bytes, before.get(gpu.uuid or "")
            run_bytes = max(0, used - used_before) if used is not None and used_before is not None else 0
            gpu = msgspec.structs.replace(gpu, memory_free_bytes=reading.memory_free_bytes + run_bytes)
        gpus.append(gpu)
    return dataclasses.replace(machine, gpus=tuple(gpus))

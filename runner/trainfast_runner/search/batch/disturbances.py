"""Judge whether other processes void a probe: they took GPU memory while its size was tried."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from trainfast_runner.records.run_directory import TELEMETRY_FILE
from trainfast_runner.records.telemetry_lines import read_ticks
from trainfast_runner.records.tick import Tick
from trainfast_runner.records.warm_process import ProbeLine
from trainfast_runner.units import mebibytes

VOIDING_BYTES = 64 << 20
"""Chosen, not measured: a probe is void if another process took more than this meanwhile."""


def void_by_others_reason(
    directory: Path,
    replies: Mapping[int, ProbeLine],
    own_pids: Collection[int],
    devices: Collection[str],
    begin_ns: int,
) -> str | None:
    """Return the reason that another process voids a probe; None if no process is known to have taken GPU memory.

    Available memory shrinks when another process takes some, but also when a size loads its kernels. At the first size
    of a warm process only the driver's list of processes tells the two apart; a later size has its kernels when
    repeated.
    """
    for rank, line in sorted(replies.items()):
        if line.number == 1 or line.available_bytes is None or line.available_after_bytes is None:
            continue
        lost_bytes = line.available_bytes - line.available_after_bytes
        if lost_bytes > VOIDING_BYTES:
            return (
                f"rank {rank}'s GPU lost {mebibytes(lost_bytes)} of free memory during the probe: to another"
                " process, or to kernels that this size was the first to load"
            )
    try:
        ticks, _ = read_ticks(directory / TELEMETRY_FILE)
    except OSError:
        return None
    return others_growth_text(ticks, own_pids, devices, begin_ns)


def others_growth_text(
    ticks: Iterable[Tick], own_pids: Collection[int], devices: Collection[str], begin_ns: int
) -> str | None:
    """Return the growth of another process on the run's devices since `begin_ns`, in words; None if none grew.

    Also None if none of `own_pids` is listed: the driver's process ids are then not those of this container.
    """
    first_bytes: dict[str, dict[int, int]] = {}
    for tick in ticks:
        for device in tick.devices:
            if device.uuid not in devices or device.uuid is None or device.processes is None:
                continue
            listed = {process.pid: process.memory_used_bytes or 0 for process in device.processes}
            other_bytes = {pid: used_bytes for pid, used_bytes in listed.items() if pid not in own_pids}
            if tick.t_ns < begin_ns or device.uuid not in first_bytes:
                first_bytes[device.uuid] = other_bytes
                continue
            if len(other_bytes) == len(listed):
                continue
            for pid, used_bytes in other_bytes.items():
                growth_bytes = used_bytes - first_bytes[device.uuid].get(pid, 0)
                if growth_bytes > VOIDING_BYTES:
                    return f"process {pid} took {mebibytes(growth_bytes)} of GPU {device.index} meanwhile"
    return None
